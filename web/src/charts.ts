// Curves and bars as SVG without text: the words beside them are HTML, so they keep their size.

import { stroke } from "./colors";
import { h, number, svg } from "./dom";
import type { Numbers } from "./data";

export type Series = { name: string; steps: number[]; values: Numbers; dots?: boolean };
type Place = { low: number; high: number; first: number; last: number };

const W = 600;
const H = 140;
const MOST_DOTS = 40;

function place(series: Series[]): Place {
  const values = series.flatMap((each) => each.values.filter((value): value is number => value !== null));
  const steps = series.flatMap((each) => each.steps);
  let [low, high] = [Math.min(...values), Math.max(...values)];
  if (low === high) [low, high] = [low - (Math.abs(low) || 1) * 0.1, high + (Math.abs(high) || 1) * 0.1];
  return { low, high, first: Math.min(...steps), last: Math.max(...steps) };
}

const x = (step: number, at: Place) => (at.last === at.first ? W / 2 : ((step - at.first) / (at.last - at.first)) * W);
const y = (value: number, at: Place) => H - 6 - ((value - at.low) / (at.high - at.low)) * (H - 12);

function path(series: Series, at: Place): string {
  let open = false;
  return series.steps
    .map((step, index) => {
      const value = series.values[index];
      if (value === null) return (open = false), "";
      const point = `${open ? "L" : "M"}${x(step, at).toFixed(1)} ${y(value, at).toFixed(1)}`;
      open = true;
      return point;
    })
    .join("");
}

/** Lines without a length: their round ends are dots that keep their shape. */
const dots = (series: Series, at: Place) =>
  series.steps.map((step, index) => (series.values[index] === null ? "" : `M${x(step, at).toFixed(1)} ${y(series.values[index] ?? 0, at).toFixed(1)}h0`)).join("");

/** A curve with its least and largest value; moving over it tells the values of a step, a click opens it. */
export function chart(title: string, series: Series[], marks: [number, string][], open: (step: number) => void): HTMLElement {
  const shown = series.filter((each) => each.values.some((value) => value !== null));
  const last = shown[0]?.values.filter((value) => value !== null).at(-1);
  const value = h("output", { class: "value" }, number(last));
  const head = h("figcaption", {}, h("span", {}, title), value);
  if (!shown.length) return h("figure", { class: "chart" }, head, h("p", { class: "quiet" }, "no values yet"));
  const at = place(shown);
  const drawing = svg("svg", { viewBox: `0 0 ${W} ${H}`, preserveAspectRatio: "none", "aria-hidden": "true" });
  for (const [step] of marks) drawing.append(svg("line", { class: "mark", x1: x(step, at), x2: x(step, at), y1: 0, y2: H }));
  shown.forEach((each, index) => {
    drawing.append(svg("path", { d: path(each, at), stroke: stroke(index), class: "line" }));
    if (each.dots || each.steps.length < MOST_DOTS) drawing.append(svg("path", { d: dots(each, at), stroke: stroke(index), class: "dots-line" }));
  });
  const cursor = svg("line", { class: "cursor", y1: 0, y2: H, visibility: "hidden" });
  drawing.append(cursor);
  const stepAt = (event: MouseEvent) => {
    const box = drawing.getBoundingClientRect();
    const wanted = at.first + ((event.clientX - box.left) / box.width) * (at.last - at.first);
    return shown[0].steps.reduce((best, step) => (Math.abs(step - wanted) < Math.abs(best - wanted) ? step : best));
  };
  const plot = h("div", {
    class: "plot",
    onmousemove: (event: MouseEvent) => {
      const step = stepAt(event);
      for (const end of ["x1", "x2"]) cursor.setAttribute(end, String(x(step, at)));
      cursor.setAttribute("visibility", "visible");
      const values = shown.flatMap((each) => (each.steps.includes(step) ? number(each.values[each.steps.indexOf(step)]) : []));
      value.replaceChildren(`step ${step}: ${values.join(", ")}`);
    },
    onmouseleave: () => {
      cursor.setAttribute("visibility", "hidden");
      value.replaceChildren(number(last));
    },
    onclick: (event: MouseEvent) => open(stepAt(event)),
  });
  plot.append(drawing, h("span", { class: "top" }, number(at.high, 2)), h("span", { class: "bottom" }, number(at.low, 2)));
  const names = shown.length > 1 ? shown.map((each, index) => swatch(stroke(index), each.name)) : [];
  return h("figure", { class: "chart" }, head, plot, h("div", { class: "ends" }, `step ${at.first}`, h("span", { class: "names" }, ...names), `${at.last}`));
}

export function swatch(color: string, name: string): HTMLElement {
  const dot = h("i", { class: "swatch", "aria-hidden": "true" });
  dot.style.background = color;
  return h("span", { class: "legend-item" }, dot, name);
}

const MOST_BARS = 120;

/** Seconds of each step by part of the work; of a long run each bar is the mean of several steps. */
export function timeline(steps: number[], parts: [string, Numbers][], open: (step: number) => void): HTMLElement {
  const width = Math.ceil(steps.length / MOST_BARS);
  const bars = Array.from({ length: Math.ceil(steps.length / width) }, (_, bar) => bar * width);
  const meanOf = (values: Numbers, from: number) => {
    const some = values.slice(from, from + width).map((value) => value ?? 0);
    return some.reduce((sum, value) => sum + value, 0) / some.length;
  };
  const heights = bars.map((from) => parts.map(([, values]) => meanOf(values, from)));
  const highest = Math.max(...heights.map((each) => each.reduce((sum, value) => sum + value, 0))) || 1;
  const drawing = svg("svg", { viewBox: `0 0 ${bars.length} ${H}`, preserveAspectRatio: "none", "aria-hidden": "true" });
  bars.forEach((from, bar) => {
    let base = H;
    const rects = heights[bar].map((seconds, part) => {
      const height = (seconds / highest) * (H - 4);
      base -= height;
      return svg("rect", { x: bar + 0.08, width: 0.84, y: base, height, fill: stroke(part) });
    });
    const title = svg("title", {}, `step ${steps[from]}: ` + parts.map(([name], part) => `${name} ${number(heights[bar][part])} s`).join(", "));
    drawing.append(svg("g", { onclick: () => open(steps[from]) }, title, ...rects));
  });
  const total = heights.flat().reduce((sum, value) => sum + value, 0) || 1;
  const share = (part: number) => Math.round((100 * heights.reduce((sum, each) => sum + each[part], 0)) / total);
  const plot = h("div", { class: "plot" }, h("span", { class: "top" }, `${number(highest)} s`));
  plot.prepend(drawing);
  return h(
    "figure",
    { class: "chart wide" },
    h("figcaption", {}, h("span", {}, "seconds of a step, by part")),
    plot,
    h("div", { class: "ends" }, `step ${steps[0]}`, h("span", {}), `${steps.at(-1)}`),
    h("div", { class: "legend" }, ...parts.map(([name], part) => swatch(stroke(part), `${name} ${share(part)} %`))),
  );
}

export function sparkline(values: Numbers): SVGElement {
  const shown: Series = { name: "", steps: values.map((_, index) => index), values };
  const drawing = svg("svg", { class: "spark", viewBox: `0 0 ${W} ${H}`, preserveAspectRatio: "none", "aria-hidden": "true" });
  if (values.some((value) => value !== null)) drawing.append(svg("path", { class: "line", stroke: stroke(0), d: path(shown, place([shown])) }));
  return drawing;
}

/** How often a value comes, in twenty bars between two bounds. */
export function histogram(values: number[], low: number, high: number, color: (value: number) => string): SVGElement {
  const bins = new Array<number>(20).fill(0);
  for (const value of values) {
    const bin = Math.floor(((value - low) / (high - low || 1)) * bins.length);
    bins[Math.min(bins.length - 1, Math.max(0, bin))]++;
  }
  const most = Math.max(...bins) || 1;
  const drawing = svg("svg", { class: "histogram", viewBox: "0 0 20 30", preserveAspectRatio: "none", "aria-hidden": "true" });
  bins.forEach((bin, index) => {
    const height = bin ? Math.max(1, (bin / most) * 30) : 0;
    const middle = low + ((index + 0.5) / bins.length) * (high - low);
    drawing.append(svg("rect", { x: index + 0.1, width: 0.8, y: 30 - height, height, fill: color(middle), class: "bin" }));
  });
  return drawing;
}

/** Rows of a name, a bar and a number. */
export function bars(rows: [string, number][], say: (value: number) => string): HTMLElement {
  const most = Math.max(...rows.map(([, value]) => value)) || 1;
  const table = h("table", { class: "bars" });
  for (const [name, value] of rows) {
    const bar = h("i", { class: "bar" });
    bar.style.width = `${((100 * value) / most).toFixed(1)}%`;
    table.append(h("tr", {}, h("th", { scope: "row", dir: "auto" }, name), h("td", { class: "track" }, bar), h("td", { class: "num" }, say(value))));
  }
  return table;
}
