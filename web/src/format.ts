// Numbers, colours and links as they are written everywhere. Colours are safe for colour-blind people: orange is low, blue is high.
import type { Group, Numbers, Sample } from "./data";
import { h, svg } from "./dom";

export function number(value: number | null | undefined, digits = 3): string {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return String(Number(value.toPrecision(digits)).toExponential()).replaceAll("-", "−").replace("+", "");
  const text = size >= 1000 ? String(Math.round(value)).replace(/\B(?=(\d{3})+$)/g, ",") : String(Number(value.toPrecision(digits)));
  return (Number.isInteger(value) && size < 1000 ? String(value) : text).replace("-", "−");
}

/** A name with its number, for a line of them. */
export function fact(name: string, value: string): HTMLElement {
  return h("span", `${name} `, h("b", value));
}

export function count(value: number, noun: string): string {
  return `${number(value)} ${noun}${value === 1 ? "" : "s"}`;
}

export function percent(share: number): string {
  return `${share > 0 && share < 0.005 ? "<1" : Math.round(share * 100)} %`;
}

export function seconds(value: number): string {
  return value < 100 ? `${number(Number(value.toPrecision(3)))} s` : `${number(Math.round(value / 6) / 10)} min`;
}

export function clock(time: number): string {
  return new Date(time * 1000).toLocaleString("sv-SE"); // 2026-11-27 16:31:07
}

export function firstLine(text: string, most = 160): string {
  const start = text.slice(0, 4 * most).trim();
  const line = start.split("\n").find((each) => each.trim()) ?? "";
  return line.slice(0, most) || "(empty)";
}

/** The last line of a prompt is the one that differs where prompts begin with the same examples. */
export function tellingLine(text: string, most = 160): string {
  const lines = text.slice(-2000).split("\n").filter((each) => each.trim());
  return lines.length > 1 ? `… ${lines.at(-1)!.slice(0, most)}` : firstLine(text, most);
}

interface Spread {
  count: number;
  mean: number | null;
  deviation: number | null;
  low: number; // Infinity of no values
  high: number;
}

export function spread(values: Iterable<number | null>): Spread {
  let [size, sum, squares, low, high] = [0, 0, 0, Infinity, -Infinity];
  for (const value of values) {
    if (value === null) continue;
    size += 1;
    sum += value;
    squares += value * value;
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  const mean = size ? sum / size : null;
  return { count: size, mean, deviation: mean === null ? null : Math.sqrt(Math.max(0, squares / size - mean * mean)), low, high };
}

export type Domain = [low: number, high: number];

export function rewardsOf(group: Group): Numbers {
  return group.samples.map((sample) => sample.reward);
}

/** 0 to 1 where rewards lie in it, otherwise their own range. */
export function rewardDomain(rewards: Numbers): Domain {
  const { low, high } = spread(rewards);
  return [Math.min(0, low), Math.max(1, high)];
}

function tint(colour: string, opacity: number): string {
  return `color-mix(in srgb, var(--${colour}) ${(100 * opacity).toFixed(1)}%, transparent)`;
}

/** From orange (the low end) over the background (the middle) to blue. `most` is the opacity at the ends. */
export function diverging(value: number, [low, high]: Domain, most = 1): string {
  const at = high > low ? Math.max(-1, Math.min(1, (2 * (value - low)) / (high - low) - 1)) : 0;
  return tint(at < 0 ? "low" : "high", Math.max(0.12, Math.abs(at)) * most);
}

/** From the background (the low end) to violet. */
export function sequential(value: number, [low, high]: Domain, most = 1): string {
  const at = high > low ? Math.max(0, Math.min(1, (value - low) / (high - low))) : 0;
  return tint("much", at * most);
}

const STRIP = 150; // pixels

/** A group's rewards as a row of cells. */
export function rewardStrip(samples: readonly Sample[], domain: Domain): SVGElement {
  const cell = Math.max(1, Math.min(12, STRIP / samples.length));
  const gap = cell > 4 ? 3 : 0;
  const cells = samples.map(({ reward }, index) => {
    const box = { x: index * cell + 0.5, y: 0.5, width: Math.max(0.5, cell - gap), height: 11, rx: gap && 2 };
    return reward === null ? svg("rect.none", box) : svg("rect", box, { style: { fill: diverging(reward, domain) } });
  });
  const words = samples.slice(0, 32).map((sample) => number(sample.reward)).join(", ");
  return svg("svg.strip", { width: cell * samples.length, height: 12, role: "img", "aria-label": `Rewards: ${words}` }, cells);
}

export function rewardChip(reward: number | null, domain: Domain): HTMLElement {
  const style = reward === null ? {} : { "background-color": diverging(reward, domain, 0.42) };
  return h("span.chip", { title: "reward", style }, number(reward));
}

export function badge(text: string, kind = ""): HTMLElement {
  return h("span", { class: `badge ${kind}` }, text);
}

/** A small curve without axes. */
export function sparkline(values: readonly (number | null)[], width: number, height: number, label: string): SVGElement {
  const { low, high } = spread(values);
  const points: string[] = [];
  const stride = Math.max(1, Math.floor(values.length / (2 * width)));
  for (let index = 0; index < values.length; index += stride) {
    const value = values[index];
    if (value === null || value === undefined) continue;
    const x = values.length > 1 ? (index / (values.length - 1)) * (width - 4) + 2 : width / 2;
    const y = high > low ? height - 2 - ((value - low) / (high - low)) * (height - 4) : height / 2;
    points.push(`${x.toFixed(1)},${y.toFixed(1)}`);
  }
  const drawn =
    points.length === 1
      ? svg("circle.point", { cx: points[0]!.split(",")[0]!, cy: points[0]!.split(",")[1]!, r: 2 })
      : svg("polyline", { points: points.join(" ") });
  return svg("svg.sparkline", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label }, drawn);
}

export function link(...words: (string | number)[]): string {
  return `#/${words.map((word) => encodeURIComponent(word)).join("/")}`;
}
