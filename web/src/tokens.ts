// A sample: its tokens, coloured by what one wants to know, beside its response and its facts.
import { fileOf, type Numbers, type Sample, type SampleTokens, type TokensData } from "./data";
import { choice, h, label, svg } from "./dom";
import { diverging, type Domain, fact, link, number, percent, rewardChip, rewardDomain, sequential, spread } from "./format";
import { badges, factsOf, failureOf, numbersOf, promptBox, responseBox } from "./group";
import { groupsOf, linkOf, nameOf, type Place, placeOf, sideOf } from "./groups";
import { load } from "./load";
import { type Context, neighbours, page, type Route, type View } from "./view";

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
const TOKENS_A_BLOCK = 200;
const MOST_TOKENS_A_BLOCK = 600;
let lastColour: Colour = "advantage";

export async function sampleView({ words, query }: Route, context: Context): Promise<View> {
  const place = placeOf(words);
  const id = words.at(-1)!;
  const groups = await groupsOf(place, context.overview);
  const placed = groups.find(({ group }) => group.samples.some((sample) => sample.id === id));
  if (!placed) throw new Error(`${nameOf(place)} has no sample ${id}.`);
  const { group, key } = placed;
  const at = group.samples.findIndex((sample) => sample.id === id);
  const sample = group.samples[at]!;
  const colour = COLOURS.find(([each]) => each === query.get("colour"))?.[0] ?? lastColour;
  const tokens = await tokensOf(sample, place);
  const advantages = group.samples.map((each) => each.advantage);
  const view = page(
    {
      title: `Sample #${sample.index}`,
      above: [[linkOf(place), nameOf(place)], [linkOf(place, "group", key), `Group ${key}`]],
      beside: [rewardChip(sample.reward, rewardDomain(groups.map((each) => each.group))), badges(sample)],
      noun: "sample",
      ...neighbours(group.samples, at, (each) => linkOf(place, "sample", each.id)),
    },
    failureOf(sample),
    h("p.summary", numbersOf(sample).map(([name, value]) => fact(name, value))),
    h(
      "div.sample",
      h(
        "div",
        tokens ? tokenSection(sample, advantages, tokens, colour, context.overview.tokenizer.error) : missing(place, context),
        h("section", { "aria-label": "Response" }, h("h2", "Response"), responseBox(sample), h("h2", "Prompt and label"), promptBox(group)),
      ),
      h("section.side-facts", { "aria-label": "Facts" }, h("h2", "Facts"), factsOf(sample)),
    ),
  );
  const pick = (index: number): void => view.element.querySelectorAll<HTMLInputElement>(".token-tools input")[index]?.click();
  const keys = tokens ? Object.fromEntries(COLOURS.map((_, index) => [index + 1, () => pick(index)])) : {};
  return { ...view, keys, ...sideOf(place) };
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
  const element = h("section", { "aria-label": "Tokens" }, h("h2", "Tokens"), h("p.empty", why));
  if (place.kind === "step") {
    const { step, tokens } = context.overview.steps;
    const whole = step.filter((each, index) => each % 8 === 1 && tokens[index]);
    const near = [whole.findLast((each) => each < place.step), whole.find((each) => each > place.step)].filter((each) => each !== undefined);
    const links = near.map((each, index) => [index > 0 && ", ", h("a", { href: link("step", each) }, `step ${each}`)]);
    if (near.length) element.append(h("p", "With all tokens: ", links));
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

function tokenSection(sample: Sample, advantages: Numbers, tokens: Loaded, first: Colour, textError: string | null): HTMLElement {
  const { columns, texts, ids } = tokens;
  const values = valuesOf(sample, columns);
  const list = new TokenList(tokens);
  const legend = h("div.token-legend");
  const detail = h("div.token-detail");
  const paint = (colour: Colour): void => {
    lastColour = colour;
    const scale = scaleOf(colour, colour === "advantage" ? [...values.advantage, ...advantages] : values[colour]);
    list.paint(values[colour].map((value) => (value === null ? "" : scale.colour(value))));
    legend.replaceChildren(...legendOf(colour, values[colour], scale));
  };
  list.chosen = (index) => detail.replaceChildren(...detailOf(index, list.text(index), ids[columns.t[index]!]!, columns, values));
  paint(first);
  detail.append(label("Point at a token, or move with the arrow keys."));
  return h(
    "section",
    { "aria-label": "Tokens" },
    h("h2", "Tokens"),
    texts === null && textError !== null && h("p.verdict.warn", textError),
    h("div.bar.token-tools", choice<Colour>("Colour", COLOURS, first, paint)),
    legend,
    list.element,
    detail,
  );
}

interface Block {
  element: HTMLElement;
  first: number; // token
  spans: HTMLElement[]; // none until the block is near the window
}

/** Tokens in blocks that end at a line's end. A block is plain text, and has an element for each token once it is near. */
class TokenList {
  readonly element = h("div.tokens", { tabindex: 0, role: "group", "aria-label": "Tokens. Arrow keys move from one to the next." });
  chosen: (index: number) => void = () => undefined;
  private readonly blocks = new Map<Element, Block>();
  private readonly blockOf: Block[] = []; // of each token
  private colours: string[] = [];
  private current = -1;

  constructor(private readonly tokens: Loaded) {
    this.element.classList.toggle("numbers-only", tokens.texts === null);
    const near = new IntersectionObserver((seen) => this.fill(seen), { root: this.element, rootMargin: "300px" });
    const size = tokens.columns.t.length;
    for (let first = 0, index = 1; index <= size; index++) {
      const isFull = (index - first > TOKENS_A_BLOCK && this.text(index - 1).endsWith("\n")) || index - first > MOST_TOKENS_A_BLOCK;
      if (!isFull && index < size) continue;
      const texts = Array.from({ length: index - first }, (_, at) => this.shown(first + at));
      const block: Block = { element: h("div.block", texts.join("")), first, spans: [] };
      this.blockOf.push(...texts.map(() => block));
      this.blocks.set(block.element, block);
      this.element.append(block.element);
      near.observe(block.element);
      first = index;
    }
    this.element.addEventListener("pointerover", (event) => this.point(event.target as HTMLElement));
    this.element.addEventListener("keydown", (event) => this.move(event));
  }

  text(index: number): string {
    const { columns, texts, ids } = this.tokens;
    return texts?.[columns.t[index]!] ?? String(ids[columns.t[index]!]);
  }

  /** Colours of the response's tokens. */
  paint(colours: string[]): void {
    this.colours = colours;
    for (const block of this.blocks.values()) this.paintBlock(block);
  }

  private shown(index: number): string {
    return this.tokens.texts ? this.text(index).replace(/\n/g, "↵\n").replace(/\t/g, "→\t") : `${this.text(index)} `;
  }

  private fill(seen: IntersectionObserverEntry[]): void {
    for (const { target, isIntersecting } of seen) if (isIntersecting) this.fillBlock(this.blocks.get(target)!);
  }

  private fillBlock(block: Block): void {
    if (block.spans.length) return;
    for (let index = block.first; this.blockOf[index] === block; index++) {
      const span = document.createElement("span");
      span.textContent = this.shown(index);
      if (index < this.tokens.columns.n) span.className = "of-prompt";
      block.spans.push(span);
    }
    block.element.replaceChildren(...block.spans);
    this.paintBlock(block);
  }

  private paintBlock({ first, spans }: Block): void {
    spans.forEach((span, at) => (span.style.backgroundColor = this.colours[first + at - this.tokens.columns.n] ?? ""));
  }

  private span(index: number): HTMLElement | undefined {
    const block = this.blockOf[index];
    if (block) this.fillBlock(block);
    return block?.spans[index - block.first];
  }

  private choose(index: number): void {
    this.span(this.current)?.classList.remove("current");
    this.current = index;
    this.span(index)?.classList.add("current");
    this.chosen(index);
  }

  private point(target: HTMLElement): void {
    const block = target.parentElement && this.blocks.get(target.parentElement);
    if (block) this.choose(block.first + block.spans.indexOf(target));
  }

  private move(event: KeyboardEvent): void {
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, Home: -Infinity, End: Infinity }[event.key];
    if (by === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    const to = this.current < 0 ? this.tokens.columns.n : this.current + by;
    this.choose(Math.max(0, Math.min(this.blockOf.length - 1, to)));
    this.span(this.current)?.scrollIntoView({ block: "nearest" });
  }
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
  return facts.map(([name, value]) => h("span", label(`${name} `), h("bdi", value)));
}

const BINS = 32;

function legendOf(colour: Colour, values: (number | null)[], { domain, colour: paint }: Scale): HTMLElement[] {
  const { count, low, high, mean } = spread(values);
  const note = h("p.label", EXPLAINED[colour]);
  if (!count) return [note, h("p.label", "This sample has no such numbers.")];
  if (colour === "mask" || colour === "version") {
    const counts = new Map<number, number>();
    for (const value of values) if (value !== null) counts.set(value, (counts.get(value) ?? 0) + 1);
    const name = (value: number): string => (colour === "version" ? `version ${value}` : value ? "trained" : "not trained");
    const keys = [...counts].sort(([a], [b]) => a - b).map(([value, tokens]) =>
      h("span", h("i.key", { style: { "background-color": paint(value) } }), `${name(value)} `, h("b", number(tokens))),
    );
    return [h("div.legend", keys), note];
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
    h("div.scale", bars, h("div.ends", [start, middle, end].map((each) => h("span", each)))),
    h("div", h("p.summary", facts.map(([name, value]) => fact(name, number(value, 4)))), note),
  ];
}
