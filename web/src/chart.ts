// Curves and stacked bars as drawings, with one crosshair for all of a page.
import { h, svg } from "./dom";
import { number, spread } from "./format";

export interface Curve {
  name: string;
  step: readonly number[];
  values: readonly (number | null)[];
  low?: readonly (number | null)[]; // of an interval around the values
  high?: readonly (number | null)[];
  hasPoints?: boolean;
}

/** The colour of one of several curves or parts. */
function strokeOf(index: number): Record<string, string> {
  return { "--stroke": `var(--part-${index})` };
}

export interface Frame {
  crosshair: ((step: number | null) => void)[]; // called with the step under the pointer, for every drawing of a page
  steps: [first: number, last: number];
  marks: readonly [number, string][];
  open: (step: number) => void;
}

const LEFT = 46;
const RIGHT = 8;
const TOP = 14;
const BOTTOM = 18;
const MOST_POINTS = 24; // of a curve of which each value has a point
const MOST_BARS = 240;

export function nearest(steps: readonly number[], step: number): number {
  let [low, high] = [0, steps.length - 1];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (steps[middle]! < step) low = middle;
    else high = middle;
  }
  return Math.abs(steps[high]! - step) < Math.abs(steps[low]! - step) ? high : low;
}

function ticks(low: number, high: number, most: number): number[] {
  const rough = (high - low) / most;
  if (!(rough > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(rough));
  const stride = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough)!;
  const found: number[] = [];
  for (let tick = Math.ceil(low / stride - 1e-9) * stride; tick <= high + stride * 1e-9; tick += stride) found.push(Number(tick.toPrecision(12)));
  return found;
}

/** A drawing as wide as its place. `bottom` and `top` are the values there. */
function drawing(
  label: string,
  { height, bottom, top }: { height: number; bottom: number; top: number },
  frame: Frame,
  steps: readonly number[],
  draw: (area: SVGElement, x: (step: number) => number, y: (value: number) => number, width: number) => void,
): SVGSVGElement {
  const root = svg("svg.drawing", { height, role: "img", "aria-label": label, tabindex: 0 });
  const cross = svg("line.cross", { y1: TOP, y2: height - BOTTOM, visibility: "hidden" });
  let width = 0;
  const [first, last] = frame.steps;
  const x = (step: number): number => LEFT + (last > first ? (step - first) / (last - first) : 0.5) * (width - LEFT - RIGHT);
  const y = (value: number): number => height - BOTTOM - ((value - bottom) / (top - bottom)) * (height - BOTTOM - TOP);
  const redraw = (): void => {
    root.replaceChildren();
    for (const tick of ticks(first, last, Math.max(2, width / 70)).filter(Number.isInteger))
      root.append(svg("text", { x: x(tick), y: height - 4, "text-anchor": "middle" }, number(tick)));
    for (const tick of ticks(bottom, top, 4)) {
      root.append(svg("line.grid", { x1: LEFT, x2: width - RIGHT, y1: y(tick), y2: y(tick) }));
      root.append(svg("text", { x: LEFT - 6, y: y(tick) + 4, "text-anchor": "end" }, number(tick)));
    }
    frame.marks.forEach(([step], index) => {
      root.append(svg("line.mark", { x1: x(step), x2: x(step), y1: TOP, y2: height - BOTTOM }));
      root.append(svg("text.mark", { x: x(step), y: TOP - 3, "text-anchor": "middle" }, index + 1));
    });
    draw(root, x, y, width);
    root.append(cross);
  };
  new ResizeObserver(() => {
    if (root.clientWidth === width) return;
    width = root.clientWidth;
    redraw();
  }).observe(root);
  let at: number | null = null;
  const move = (step: number | null): void => frame.crosshair.forEach((tell) => tell(step));
  const choose = (index: number): void => move(steps[Math.max(0, Math.min(steps.length - 1, index))] ?? null);
  root.addEventListener("pointermove", (event) => {
    const share = (event.offsetX - LEFT) / Math.max(1, width - LEFT - RIGHT);
    if (steps.length) choose(nearest(steps, first + share * (last - first)));
  });
  for (const end of ["pointerleave", "blur"]) root.addEventListener(end, () => move(null));
  root.addEventListener("click", () => at !== null && frame.open(at));
  root.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity }[event.key];
    if (event.key === "Enter" && at !== null) frame.open(at);
    if (by === undefined || !steps.length) return;
    event.preventDefault();
    choose(at === null ? (by > 0 ? 0 : steps.length - 1) : nearest(steps, at) + by);
  });
  frame.crosshair.push((step) => {
    at = step;
    cross.setAttribute("visibility", step === null ? "hidden" : "visible");
    if (step !== null) for (const end of ["x1", "x2"]) cross.setAttribute(end, String(x(step)));
  });
  return root;
}

/** One figure: its name, its values at the crosshair (the last ones without it), and its curves. */
export function curveFigure(title: string, curves: readonly Curve[], frame: Frame, remove?: () => void): HTMLElement {
  let { low, high } = spread(curves.flatMap((curve) => [...curve.values, ...(curve.low ?? []), ...(curve.high ?? [])]));
  if (!(high >= low)) [low, high] = [0, 1];
  const pad = high > low ? (high - low) * 0.06 : Math.abs(high) * 0.1 || 0.5;
  const axis = { height: 150, bottom: low >= 0 && low < pad * 4 ? 0 : low - pad, top: high + pad };
  const main = curves[0]!;
  const ends = [main.values.find((value) => value !== null), main.values.findLast((value) => value !== null)];
  const label = `${title}, steps ${main.step[0]} to ${main.step.at(-1)}: from ${number(ends[0])} to ${number(ends[1])}`;
  const root = drawing(label, axis, frame, main.step, (area, x, y) =>
    curves.forEach((curve, index) => {
      if (curve.low && curve.high) area.append(svg("path.band", { style: strokeOf(index), d: band(curve, x, y) }));
      area.append(svg("path.line", { style: strokeOf(index), d: path(curve, x, y) }));
      if (!curve.hasPoints && curve.values.length > MOST_POINTS) return;
      curve.values.forEach((value, at) => {
        if (value !== null) area.append(svg("circle.point", { style: strokeOf(index), cx: x(curve.step[at]!), cy: y(value), r: 2.5 }));
      });
    }),
  );
  const values = h("span.values");
  const tell = (step: number | null): void => {
    const shown = curves.map((curve, index) => {
      const at = step === null ? curve.values.length - 1 : nearest(curve.step, step);
      const value = step !== null && curve.step[at] !== step && !curve.hasPoints ? null : curve.values[at];
      return h("span", { class: curves.length > 1 && "keyed", style: strokeOf(index) }, index > 0 && `${curve.name} `, h("b", number(value)));
    });
    values.replaceChildren(step === null ? "" : h("span.at", `step ${step}`), ...shown);
  };
  frame.crosshair.push(tell);
  tell(null);
  const button = remove && h("button.plain", { "aria-label": `Remove ${title}`, click: remove }, "×");
  return h("figure.curve", h("figcaption", h("span.name", title), values, button), root);
}

function path(curve: Curve, x: (step: number) => number, y: (value: number) => number): string {
  let text = "";
  let isDown = false;
  curve.values.forEach((value, index) => {
    if (value !== null) text += `${isDown ? "L" : "M"}${x(curve.step[index]!).toFixed(1)} ${y(value).toFixed(1)}`;
    isDown = value !== null || (curve.hasPoints === true && isDown);
  });
  return text;
}

function band(curve: Curve, x: (step: number) => number, y: (value: number) => number): string {
  const all = curve.step.map((step, index) => [step, curve.low![index], curve.high![index]] as const);
  const there = all.filter(([, low, high]) => low != null && high != null);
  const upper = there.map(([step, , high]) => `${x(step).toFixed(1)} ${y(high!).toFixed(1)}`);
  const lower = there.map(([step, low]) => `${x(step).toFixed(1)} ${y(low!).toFixed(1)}`).reverse();
  return upper.length ? `M${[...upper, ...lower].join("L")}Z` : "";
}

/** Parts of each step on top of each other. Neighbouring steps share a bar where there are many. */
export function stackedFigure(title: string, unit: (value: number) => string, parts: readonly Curve[], frame: Frame): HTMLElement {
  const steps = parts[0]!.step;
  const size = Math.ceil(steps.length / MOST_BARS) || 1;
  const bars = Array.from({ length: Math.ceil(steps.length / size) }, (_, bar) =>
    parts.map((part) => spread(part.values.slice(bar * size, (bar + 1) * size)).mean ?? 0),
  );
  const most = Math.max(...bars.map((bar) => bar.reduce((sum, each) => sum + each, 0)), 1e-9);
  const inset: Frame = { ...frame, steps: [frame.steps[0] - 0.5 * size, frame.steps[1] + 0.5 * size] };
  const label = `${title}: seconds of each step by what it did`;
  const root = drawing(label, { height: 190, bottom: 0, top: most * 1.05 }, inset, steps, (area, x, y, width) => {
    const slot = (width - LEFT - RIGHT) / Math.max(1, (inset.steps[1] - inset.steps[0]) / size);
    const thick = Math.min(slot - Math.min(slot * 0.2, 8), 56);
    const bottoms = bars.map(() => 0);
    parts.forEach((_, part) => {
      let text = "";
      bars.forEach((bar, index) => {
        const [value, from] = [bar[part]!, bottoms[index]!];
        bottoms[index] = from + value;
        const middle = x((steps[index * size]! + steps[Math.min(steps.length, (index + 1) * size) - 1]!) / 2);
        const [left, start, end] = [middle - thick / 2, y(from), y(from + value)].map((each) => each.toFixed(1));
        if (value > 0) text += `M${left} ${start}V${end}h${thick.toFixed(1)}V${start}Z`;
      });
      area.append(svg("path.part", { style: strokeOf(part), d: text }));
    });
  });
  const legend = h("div.legend");
  const tell = (step: number | null): void => {
    const values = parts.map((part) => (step === null ? spread(part.values).mean : part.values[nearest(steps, step)]));
    legend.replaceChildren(
      h("span.at", step === null ? "mean of all steps" : `step ${step}`),
      ...parts.map(({ name }, index) => h("span", h("i.key.part", { style: strokeOf(index) }), `${name} `, h("b", values[index] == null ? "–" : unit(values[index])))),
    );
  };
  frame.crosshair.push(tell);
  tell(null);
  return h("figure.stack", h("figcaption", h("span.name", title)), root, legend);
}
