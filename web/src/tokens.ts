// One sample, token by token, coloured by what the trainer knows of each.

import { swatch, histogram } from "./charts";
import { amount, diverging, kind, type Scale } from "./colors";
import { count, h, number, text } from "./dom";
import type { Numbers, Sample, TokenColumns, TokenData } from "./data";

type Mode = "mask" | "version" | "log-prob" | "advantage" | "gap";
const MODES: Record<Mode, string> = { mask: "trained", version: "policy version", "log-prob": "log-prob", advantage: "advantage", gap: "trainer − engine" };
const MOST_TOKENS = 4000;
let mode: Mode = "log-prob";

const gaps = (columns: TokenColumns): Numbers =>
  columns.engine.map((engine, index) => {
    const trainer = columns.trainer[index];
    return engine === null || trainer === null || trainer === undefined ? null : trainer - engine;
  });

export function tokensView(data: TokenData, sample: Sample): HTMLElement {
  const columns = data.samples[sample.id];
  const values: Record<"log-prob" | "advantage" | "gap", Numbers> = { "log-prob": columns.engine.length ? columns.engine : columns.trainer, advantage: columns.advantage, gap: gaps(columns) };
  const versionOf = (at: number) => sample.ranges.find(([, start, end]) => start <= at && at < end)?.[0] ?? null;
  const versions = [...new Set(sample.ranges.map(([version]) => version))];
  const shown = Math.min(columns.t.length, MOST_TOKENS);
  const tokenText = (index: number) => (data.texts ? data.texts[columns.t[index]] : String(data.ids[columns.t[index]]));
  const spans = Array.from({ length: shown }, (_, index) => {
    const content = tokenText(index);
    const span = h("span", { class: index < columns.n ? "token asked" : "token", "data-at": index }, data.texts ? content.replace(/\n/g, "⏎\n") : content);
    return span;
  });
  const flow = h("div", { class: data.texts ? "tokens" : "tokens ids", tabindex: "0", role: "group", "aria-label": "Tokens: arrow keys move, values are below" }, ...spans);
  const detail = h("output", { class: "detail", "aria-live": "polite" }, "Point at a token, or move with the arrow keys.");
  const legend = h("div", { class: "legend" });
  let at = -1;

  const inspect = (index: number) => {
    if (index < 0 || index >= shown) return;
    if (at >= 0) spans[at].classList.remove("here");
    at = index;
    spans[at].classList.add("here");
    const place = index - columns.n;
    const facts: [string, string][] = [["token", JSON.stringify(tokenText(index))], ["id", String(data.ids[columns.t[index]])], ["position", `${index} of ${columns.t.length}`]];
    if (place >= 0) {
      facts.push(["trained", columns.mask[place] ? "yes" : "no"], ["version", String(versionOf(place) ?? "–")], ["engine", number(columns.engine[place])], ["trainer", number(columns.trainer[place])]);
      facts.push(["gap", number(values.gap[place])], ["advantage", number(columns.advantage[place])]);
    } else facts.push(["part", "prompt"]);
    detail.replaceChildren(...facts.map(([name, value]) => h("span", { class: "fact" }, h("b", {}, name), ` ${value}`)));
  };

  const paint = () => {
    const trained = (numbers: Numbers) => numbers.filter((value, index): value is number => value !== null && columns.mask[index] > 0);
    let colorOf: (place: number) => string;
    if (mode === "mask") {
      colorOf = (place) => (columns.mask[place] ? kind(0) : "transparent");
      legend.replaceChildren(swatch(kind(0), "trained"), swatch("transparent", "not trained (a tool, the environment, the user)"));
    } else if (mode === "version") {
      colorOf = (place) => {
        const version = versionOf(place);
        return version === null ? "transparent" : kind(versions.indexOf(version));
      };
      legend.replaceChildren(...versions.map((version, index) => swatch(kind(index), `version ${version}`)));
    } else {
      const numbers = values[mode];
      const known = trained(numbers);
      const scale = mode === "log-prob" ? amount(known) : diverging(known);
      colorOf = (place) => {
        const value = numbers[place];
        return value === null || value === undefined || !columns.mask[place] ? "transparent" : scale.color(value);
      };
      legend.replaceChildren(known.length ? scaleOf(scale, known) : h("span", { class: "quiet" }, mode === "gap" ? "No engine sampled these tokens." : "These tokens have no such value."));
    }
    spans.forEach((span, index) => {
      if (index >= columns.n) span.style.background = colorOf(index - columns.n);
    });
    for (const button of modes.children) button.setAttribute("aria-pressed", String((button as HTMLElement).dataset.mode === mode));
  };
  const modes = h("div", { class: "modes", role: "group", "aria-label": "Colour tokens by" }, ...(Object.keys(MODES) as Mode[]).map((name, index) => h("button", { "data-mode": name, title: `key ${index + 1}`, onclick: () => ((mode = name), paint()) }, MODES[name])));

  flow.addEventListener("mouseover", (event) => inspect(Number((event.target as HTMLElement).dataset.at ?? -1)));
  flow.addEventListener("keydown", (event) => {
    const move: Record<string, number> = { ArrowRight: 1, ArrowDown: 10, ArrowLeft: -1, ArrowUp: -10 };
    if (!(event.key in move)) return;
    event.preventDefault();
    inspect(Math.max(0, Math.min(shown - 1, (at < 0 ? columns.n - 1 : at) + move[event.key])));
    spans[at]?.scrollIntoView({ block: "nearest" });
  });
  paint();
  const rest = columns.t.length - shown;
  return h("section", { class: "tokens-view" }, modes, legend, flow, rest ? h("p", { class: "quiet" }, `${count(rest)} more tokens are not drawn.`) : null, detail);
}

function scaleOf(scale: Scale, values: number[]): HTMLElement {
  const ramp = h("i", { class: "ramp", "aria-hidden": "true" });
  ramp.style.background = `linear-gradient(to right, ${scale.ends[0]}, ${scale.low < 0 && scale.high > 0 ? "transparent, " : ""}${scale.ends[1]})`;
  return h("div", { class: "scale" }, histogram(values, scale.low, scale.high, scale.color), ramp, h("div", { class: "ends" }, h("span", {}, number(scale.low, 2)), h("span", {}, number(scale.high, 2))));
}

/** Why a sample has none: they would fill the disk. */
export const withoutTokens = (sample: Sample) =>
  h(
    "section",
    {},
    h("p", { class: "quiet" }, "The tokens of this sample were not recorded: they are kept for all samples of each eighth step, and for the eight best and worst of the others."),
    text(sample.response, "text said"),
  );

export const pressMode = (index: number) => document.querySelectorAll<HTMLButtonElement>(".modes button")[index]?.click();
