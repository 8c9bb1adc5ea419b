// A sample: its tokens, coloured by what one wants to know, beside its response and its facts.
import { fileOf, type Group, type Sample, type SampleTokens, type TokensData } from "./data";
import { choice, h, label, svg } from "./dom";
import { diverging, type Domain, fact, link, number, percent, rewardChip, rewardDomain, sequential, spread } from "./format";
import { badges, factsOf, numbersOf, promptBox, responseBox } from "./group";
import { groupsOf, nameOf, pagerOf, type Place, placeOf, sideOf, wordsOf } from "./groups";
import { load } from "./load";
import type { Context, Route, View } from "./view";

type Colour = "mask" | "version" | "engine" | "advantage" | "gap";
const COLOURS: [Colour, string][] = [
  ["mask", "mask"],
  ["version", "version"],
  ["engine", "log-prob"],
  ["advantage", "advantage"],
  ["gap", "gap"],
];
const EXPLAINED: Record<Colour, string> = {
  mask: "Blue tokens are trained. The others are the environment's, or were taken out of the loss.",
  version: "The version of the weights that sampled the token. A stronger colour is newer.",
  engine: "Log-probability of the token when the engine sampled it, in nats. A stronger colour is less likely.",
  advantage: "Blue tokens become more likely, orange ones less.",
  gap: "Log-probability by the trainer minus that by the engine, in nats, before the step. Both ends of the scale are errors of numerics or staleness.",
};
const TINT = 0.48; // opacity behind text, which stays readable in both themes
const TINT_OF_ONE = 0.58; // of a scale with one colour
const TOKENS_A_BLOCK = 200; // a block that is not visible is not laid out
const MOST_TOKENS_A_BLOCK = 600;
let lastColour: Colour = "advantage";

export async function sampleView({ words, query }: Route, context: Context): Promise<View> {
  const place = placeOf(words);
  const id = words.at(-1)!;
  const groups = await groupsOf(place, context.overview);
  const at = groups.findIndex(({ group }) => group.samples.some((sample) => sample.id === id));
  if (at < 0) throw new Error(`${nameOf(place)} has no sample ${id}.`);
  const { group, key } = groups[at]!;
  const number = group.samples.findIndex((sample) => sample.id === id);
  const sample = group.samples[number]!;
  const to = (other: Sample | undefined): string | undefined => other && link(...wordsOf(place), "sample", other.id);
  const [previous, next] = [to(group.samples[number - 1]), to(group.samples[number + 1])];
  const parent = link(...wordsOf(place), "group", key);
  const colour = COLOURS.find(([each]) => each === query.get("colour"))?.[0] ?? lastColour;
  const tokens = await tokensOf(sample, place);
  const textError = context.overview.tokenizer.error;
  const view: View = {
    title: `Sample ${id}`,
    element: h(
      "div",
      { class: "page" },
      h(
        "p",
        { class: "crumbs" },
        h("a", { href: link(...wordsOf(place)) }, nameOf(place)),
        " / ",
        h("a", { href: parent }, place.kind === "untrained" ? group.id : `Group ${key}`),
      ),
      h(
        "div",
        { class: "bar" },
        h("h1", {}, `Sample #${sample.index}`),
        rewardChip(sample.reward, rewardDomain(groups.map((each) => each.group))),
        badges(sample),
        pagerOf(previous, next, "sample"),
      ),
      sample.failure && h("p", { class: "verdict bad" }, h("b", {}, `${sample.failure[0]}. `), h("bdi", {}, sample.failure[1])),
      h("p", { class: "summary" }, numbersOf(sample).map(([name, value]) => fact(name, value))),
      h(
        "div",
        { class: "sample" },
        h("div", {}, tokens ? tokenSection(sample, group, tokens, colour, textError) : missing(place, context), textSection(sample, group)),
        h("section", { class: "side-facts", "aria-label": "Facts" }, h("h2", {}, "Facts"), factsOf(sample)),
      ),
    ),
    previous,
    next,
    parent,
    ...sideOf(place),
  };
  if (tokens)
    view.keys = Object.fromEntries(
      COLOURS.map((_, index) => [String(index + 1), () => view.element.querySelectorAll<HTMLInputElement>(".token-tools input")[index]?.click()]),
    );
  return view;
}

function textSection(sample: Sample, group: Group): HTMLElement {
  return h("section", { "aria-label": "Response" }, h("h2", {}, "Response"), responseBox(sample), h("h2", {}, "Prompt and label"), promptBox(group));
}

interface Loaded {
  columns: SampleTokens;
  texts: string[] | null;
  ids: number[];
}

async function tokensOf(sample: Sample, place: Place): Promise<Loaded | null> {
  if (!sample.has_tokens || place.kind !== "step") return null;
  const data = await load<TokensData>(fileOf("tokens", place.step));
  const columns = data.samples[sample.id];
  return columns ? { columns, texts: data.texts, ids: data.ids } : null;
}

function missing(place: Place, context: Context): HTMLElement {
  const why =
    place.kind === "evaluation"
      ? "Samples of an evaluation have no tokens here: they are not trained."
      : place.kind === "untrained"
        ? "Only trained samples have tokens here."
        : "A run keeps the tokens of all samples of every eighth step (1, 9, 17, …). Of other steps it keeps those of the eight best and the eight worst samples. " +
          "This sample is not among them.";
  const element = h("section", { "aria-label": "Tokens" }, h("h2", {}, "Tokens"), h("p", { class: "empty" }, why));
  if (place.kind === "step") {
    const { step, tokens } = context.overview.steps;
    const whole = step.filter((each, index) => each % 8 === 1 && tokens[index]);
    const near = [whole.findLast((each) => each < place.step), whole.find((each) => each > place.step)].filter((each) => each !== undefined);
    const links = near.map((each, index) => [index > 0 && ", ", h("a", { href: link("step", each) }, `step ${each}`)]);
    if (near.length) element.append(h("p", {}, "With all tokens: ", links));
  }
  return element;
}

/** Numbers of the response's tokens by colour; null where there is none. */
function valuesOf(sample: Sample, { mask, engine, trainer, advantage }: SampleTokens): Record<Colour, (number | null)[]> {
  const version = mask.map(() => null as number | null);
  for (const [each, start, end] of sample.ranges) version.fill(each, start, end);
  return {
    mask,
    version,
    engine: mask.map((_, index) => engine[index] ?? null),
    advantage: mask.map((_, index) => advantage[index] ?? null),
    gap: mask.map((trained, index) => {
      const [ours, theirs] = [trainer[index] ?? null, engine[index] ?? null];
      return !trained || ours === null || theirs === null ? null : ours - theirs;
    }),
  };
}

interface Scale {
  domain: Domain;
  colour: (value: number) => string;
}

function scaleOf(colour: Colour, values: (number | null)[]): Scale {
  const { low, high, count } = spread(values);
  if (!count) return { domain: [0, 1], colour: () => "transparent" };
  if (colour === "mask") return { domain: [0, 1], colour: (value) => (value ? diverging(1, [0, 1], TINT * 0.8) : "transparent") };
  if (colour === "engine") return { domain: [low, 0], colour: (value) => sequential(-value, [0, Math.max(-low, 1e-9)], TINT_OF_ONE) };
  if (colour === "version") return { domain: [low, high], colour: (value) => sequential(value, [low - (high - low || 1) * 0.35, high], TINT_OF_ONE) };
  const most = Math.max(Math.abs(low), Math.abs(high)) || 1;
  return { domain: [-most, most], colour: (value) => diverging(value, [-most, most], TINT) };
}

function tokenSection(sample: Sample, group: Group, { columns, texts, ids }: Loaded, first: Colour, textError: string | null): HTMLElement {
  const values = valuesOf(sample, columns);
  const spans: HTMLElement[] = [];
  const text = (index: number): string => texts?.[columns.t[index]!] ?? String(ids[columns.t[index]!]);
  const words = "Tokens. Arrow keys move from one to the next.";
  const box = h("div", { class: `tokens ${texts ? "" : "numbers-only"}`, tabindex: 0, role: "group", "aria-label": words });
  box.append(...blocks(columns, text, spans, texts === null));
  const legend = h("div", { class: "token-legend" });
  const paint = (colour: Colour): void => {
    lastColour = colour;
    const scale = scaleOf(colour, colour === "advantage" ? [...values.advantage, ...group.samples.map((each) => each.advantage)] : values[colour]);
    for (let index = columns.n; index < spans.length; index++) {
      const value = values[colour][index - columns.n] ?? null;
      spans[index]!.style.backgroundColor = value === null ? "" : scale.colour(value);
    }
    legend.replaceChildren(...legendOf(colour, values[colour], scale));
  };
  const detail = h("div", { class: "token-detail" });
  let current = -1;
  const choose = (index: number): void => {
    spans[current]?.classList.remove("current");
    current = index;
    spans[current]?.classList.add("current");
    if (index < 0) detail.replaceChildren(label("Point at a token, or move with the arrow keys."));
    else detail.replaceChildren(...detailOf(index, text(index), ids[columns.t[index]!]!, columns, values));
  };
  const numbers = new Map(spans.map((span, index) => [span, index]));
  box.addEventListener("pointerover", (event) => {
    const index = numbers.get(event.target as HTMLElement);
    if (index !== undefined) choose(index);
  });
  box.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, Home: -Infinity, End: Infinity }[event.key];
    if (by === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    choose(Math.max(0, Math.min(spans.length - 1, current < 0 ? columns.n : current + by)));
    spans[current]?.scrollIntoView({ block: "nearest" });
  });
  paint(first);
  choose(-1);
  return h(
    "section",
    { "aria-label": "Tokens" },
    h("h2", {}, "Tokens"),
    texts === null && textError !== null && h("p", { class: "verdict warn" }, textError),
    h("div", { class: "bar token-tools" }, choice<Colour>("Colour", COLOURS, first, paint)),
    legend,
    box,
    detail,
  );
}

/** Tokens in blocks that end at a line's end. */
function blocks(columns: SampleTokens, text: (index: number) => string, spans: HTMLElement[], isNumbers: boolean): HTMLElement[] {
  const found: HTMLElement[] = [];
  let block = h("div", { class: "block" });
  let size = 0;
  for (let index = 0; index < columns.t.length; index++) {
    const shown = text(index);
    const span = document.createElement("span");
    span.textContent = isNumbers ? shown : shown.replace(/\n/g, "↵\n").replace(/\t/g, "→\t");
    if (index < columns.n) span.className = "of-prompt";
    spans.push(span);
    block.append(span);
    size += 1;
    if ((size > TOKENS_A_BLOCK && shown.endsWith("\n")) || size > MOST_TOKENS_A_BLOCK) {
      found.push(block);
      block = h("div", { class: "block" });
      size = 0;
    }
  }
  return [...found, block];
}

function detailOf(index: number, text: string, id: number, columns: SampleTokens, values: Record<Colour, (number | null)[]>): HTMLElement[] {
  const at = index - columns.n;
  const facts: [string, string][] = [
    ["token", JSON.stringify(text)],
    ["id", String(id)],
    ["position", at < 0 ? `${index} of the prompt` : `${at} of the response`],
  ];
  if (at >= 0) {
    const logProb = values.engine[at] ?? null;
    facts.push(
      ["mask", values.mask[at] ? "trained" : "not trained"],
      ["version", number(values.version[at])],
      ["engine", logProb === null ? "–" : `${number(logProb, 5)} (${percent(Math.exp(logProb))})`],
      ["trainer", number(columns.trainer[at], 5)],
      ["gap", number(values.gap[at])],
      ["advantage", number(values.advantage[at], 4)],
    );
  }
  return facts.map(([name, value]) => h("span", {}, label(`${name} `), h("bdi", {}, value)));
}

const BINS = 32;

function legendOf(colour: Colour, values: (number | null)[], { domain, colour: paint }: Scale): HTMLElement[] {
  const { count, low, high, mean } = spread(values);
  const note = h("p", { class: "label" }, EXPLAINED[colour]);
  if (!count) return [note, h("p", { class: "label" }, "This sample has no such numbers.")];
  if (colour === "mask" || colour === "version") {
    const counts = new Map<number, number>();
    for (const value of values) if (value !== null) counts.set(value, (counts.get(value) ?? 0) + 1);
    const name = (value: number): string => (colour === "version" ? `version ${value}` : value ? "trained" : "not trained");
    const keys = [...counts].sort(([a], [b]) => a - b).map(([value, tokens]) =>
      h("span", {}, h("i", { class: "key", style: { "background-color": paint(value) } }), `${name(value)} `, h("b", {}, number(tokens))),
    );
    return [h("div", { class: "legend" }, keys), note];
  }
  const facts: [string, number | null][] = [["lowest", low], ["mean", mean], ["highest", high]];
  const bins = new Array<number>(BINS).fill(0);
  const width = domain[1] - domain[0] || 1;
  for (const value of values) if (value !== null) bins[Math.max(0, Math.min(BINS - 1, Math.floor(((value - domain[0]) / width) * BINS)))]! += 1;
  const most = Math.max(...bins);
  const [start, middle, end] = [domain[0], (domain[0] + domain[1]) / 2, domain[1]].map((each) => number(each));
  const bars = svg("svg", { class: "histogram", width: BINS * 7, height: 36, role: "img", "aria-label": `Histogram from ${start} to ${end}` });
  bins.forEach((size, bin) => {
    const tall = size ? Math.max(2, (30 * size) / most) : 0;
    bars.append(
      svg("rect", { x: bin * 7, y: 30 - tall, width: 6, height: tall, class: "bin" }),
      svg("rect", { x: bin * 7, y: 31, width: 7, height: 5, style: { fill: paint(domain[0] + ((bin + 0.5) / BINS) * width) } }),
    );
  });
  return [
    h("div", { class: "scale" }, bars, h("div", { class: "ends" }, [start, middle, end].map((each) => h("span", {}, each)))),
    h("div", {}, h("p", { class: "summary" }, facts.map(([name, value]) => fact(name, number(value, 4)))), note),
  ];
}
