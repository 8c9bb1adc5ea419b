// The life of a sample: what each service, engine and rank did for it, and when.
import { type Overview, fileOf, type TraceData, type TraceSpan } from "./data";
import { folded, h, label, section, svg } from "./dom";
import { seconds } from "./format";
import { load } from "./load";

const ROW = 17;
const GAP = 7; // between lanes
const LEFT = 76;
const BOTTOM = 20;
const CHARACTER = 6.2; // pixels
const MOST_OF_ALL = 1 / 12; // an interval in which nothing begins or ends is drawn no wider than this share

interface Placed {
  span: TraceSpan;
  y: number;
}

interface Drawn {
  placed: Placed[];
  lanes: { name: string; y: number; height: number }[];
  height: number;
}

export async function traceOf(id: string, step: number, overview: Overview): Promise<HTMLElement | null> {
  if (!overview.traced) return null;
  const { lanes, samples } = await load<TraceData>(fileOf("trace", step));
  const spans = samples[id];
  if (!spans) return section("Trace", h("p.empty", "This sample was not traced. A higher --trace-sample-ratio traces more."));
  const start = spans[0]![2];
  const detail = h("div.trace-detail", label("Point at a bar."));
  const chosen = ([lane, name, begun, ended, error]: TraceSpan): void => {
    const facts: [string, string][] = [["what", name], ["where", lanes[lane]!], ["after", seconds(begun - start)], ["took", seconds(ended - begun)]];
    if (error) facts.push(["error", error]);
    detail.replaceChildren(...facts.map(([key, value]) => h("span", label(`${key} `), h("bdi", value))));
  };
  return section("Trace", drawing(placedOf(spans, lanes), lanes, start, chosen), detail, folded("As a table", false, () => table(spans, lanes, start)));
}

/** A lane has a row for each level of spans within spans, and more where some overlap. */
function placedOf(spans: TraceSpan[], names: string[]): Drawn {
  const placed: Placed[] = [];
  const lanes: Drawn["lanes"] = [];
  let y = 0;
  names.forEach((name, lane) => {
    const ends: number[] = [];
    for (const span of spans.filter((each) => each[0] === lane)) {
      const [, , begun, ended] = span;
      let row = ends.findLastIndex((end) => end >= ended && end > begun) + 1; // below what it lies in
      while ((ends[row] ?? -Infinity) > begun) row++;
      ends[row] = ended;
      for (let below = row + 1; below < ends.length; below++) if (ends[below]! <= begun) ends[below] = -Infinity;
      placed.push({ span, y: y + row * ROW });
    }
    if (!ends.length) return;
    lanes.push({ name, y, height: ends.length * ROW });
    y += ends.length * ROW + GAP;
  });
  return { placed, lanes, height: y };
}

/** Pieces of the time axis: long ones in which nothing begins or ends are shortened. */
function piecesOf(spans: TraceSpan[]): { from: number; to: number; width: number }[] {
  const times = [...new Set(spans.flatMap(([, , begun, ended]) => [begun, ended]))].sort((a, b) => a - b);
  const most = (times.at(-1)! - times[0]!) * MOST_OF_ALL || 1;
  return times.slice(1).map((to, index) => ({ from: times[index]!, to, width: Math.min(to - times[index]!, most) }));
}

/** Of services; a trainer's ranks have its colour. */
function colourOf(lane: string): number {
  const service = ["buffer", "rollout", "engine", "reward"].findIndex((name) => lane.startsWith(name));
  return service < 0 ? 4 : service;
}

function drawing({ placed, lanes, height }: Drawn, names: string[], start: number, chosen: (span: TraceSpan) => void): HTMLElement {
  const pieces = piecesOf(placed.map(({ span }) => span));
  const all = pieces.reduce((sum, { width }) => sum + width, 0) || 1;
  const root = svg("svg.drawing.trace", { height: height + BOTTOM, role: "img", "aria-label": "Spans by service, over time. They follow as a table." });
  let width = 0;
  const redraw = (): void => {
    root.replaceChildren();
    const scale = Math.max(width - LEFT - 4, 0) / all;
    const at = new Map<number, number>([[pieces[0]?.from ?? start, LEFT]]);
    let x = LEFT;
    let labelled = LEFT;
    root.append(svg("text", { x: LEFT, y: height + 13 }, "0 s"));
    for (const { from, to, width: share } of pieces) {
      const right = x + share * scale;
      if (share < to - from) {
        root.append(svg("rect.break", { x, y: 0, width: right - x, height }));
        if (right - x > 56) root.append(svg("text.mark", { x: (x + right) / 2, y: height + 13, "text-anchor": "middle" }, `↔ ${seconds(to - from)}`));
        labelled = right - 60;
      } else if (x - labelled > 64 && right - x > 36) {
        root.append(svg("text", { x, y: height + 13 }, seconds(from - start)));
        labelled = x;
      }
      at.set(to, (x = right));
    }
    for (const { name, y, height: high } of lanes) {
      root.append(svg("line.grid", { x1: 0, x2: width, y1: y + high + GAP / 2, y2: y + high + GAP / 2 }));
      root.append(svg("text", { x: 0, y: y + 12 }, name));
    }
    for (const { span, y } of placed) {
      const [lane, name, begun, ended, error] = span;
      const [left, right] = [at.get(begun)!, at.get(ended)!];
      const bar = svg("rect.bar", { class: error && "failed", x: left, y, width: Math.max(right - left, 1.5), height: ROW - 2, rx: 2, style: { "--stroke": `var(--part-${colourOf(names[lane]!)})` } });
      const text = error ? `${name}: ${error.split(":")[0]}` : name;
      const room = Math.floor((right - left - 6) / CHARACTER);
      root.append(svg("g", { pointerenter: () => chosen(span) }, bar, room > 2 && svg("text.name", { x: left + 4, y: y + 11.5 }, room < text.length ? `${text.slice(0, room - 1)}…` : text)));
    }
  };
  new ResizeObserver(() => {
    if (root.clientWidth === width) return;
    width = root.clientWidth;
    redraw();
  }).observe(root);
  return h("div.trace-box", root);
}

function table(spans: TraceSpan[], lanes: string[], start: number): HTMLElement {
  const row = ([lane, name, begun, ended, error]: TraceSpan): HTMLElement =>
    h("tr", h("td", seconds(begun - start)), h("td", seconds(ended - begun)), h("td", lanes[lane]), h("td", name, error && h("span.label", ` ${error}`)));
  return h("table", h("thead", h("tr", ["after", "took", "where", "what"].map((name) => h("th", { scope: "col" }, name)))), h("tbody", spans.map(row)));
}
