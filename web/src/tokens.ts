// A sample: its tokens, coloured by what one wants to know, beside its response and its facts.
import { fileOf, type Numbers, type Sample, type SampleTokens, type TokensData } from "./data";
import { choice, h, label, section } from "./dom";
import { diverging, fact, link, number, percent, rewardChip, rewardDomain, rewardsOf, sequential, spread } from "./format";
import { badges, factsOf, failureOf, numbersOf, promptBox, responseBox } from "./group";
import { groupsOf, linkOf, nameOf, type Place, placeOf, sideOf } from "./groups";
import { load } from "./load";
import { traceOf } from "./trace";
import { type Context, neighbours, page, type Route, type View } from "./view";

type Colour = "mask" | "version" | "engine" | "advantage" | "gap";
const COLOURS: [Colour, string, explained: string][] = [
  ["mask", "mask", "Blue tokens are trained. The others are the environment's, or were taken out of the loss."],
  ["version", "version", "The version of the weights that sampled the token. A stronger colour is newer."],
  ["engine", "log-prob", "Log-probability of the token when the engine sampled it, in nats. A stronger colour is less likely."],
  ["advantage", "advantage", "Blue tokens become more likely, orange ones less."],
  ["gap", "gap", "Log-probability by the trainer minus that by the engine, in nats, before the step. Both ends of the scale are errors of numerics or staleness."],
];
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
  const trace = place.kind === "step" && place.step !== null ? await traceOf(sample.id, place.step, context.overview) : null;
  const advantages = group.samples.map((each) => each.advantage);
  const view = page(
    {
      title: `Sample #${sample.index}`,
      above: [[linkOf(place), nameOf(place)], [linkOf(place, "group", key), `Group ${key}`]],
      beside: [rewardChip(sample.reward, rewardDomain(groups.flatMap(({ group }) => rewardsOf(group)))), badges(sample)],
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
        trace,
        section("Response", responseBox(sample), h("h2", "Prompt and label"), promptBox(group)),
      ),
      h("section.side-facts", { "aria-label": "Facts" }, h("h2", "Facts"), factsOf(sample)),
    ),
  );
  const pick = (index: number): void => view.element.querySelectorAll<HTMLInputElement>(".token-tools input")[index]?.click();
  const keys = tokens ? Object.fromEntries(COLOURS.map((_, index) => [index + 1, () => pick(index)])) : {};
  return { ...view, keys, ...sideOf(place) };
}

interface Tokens extends TokensData {
  columns: SampleTokens;
}

async function tokensOf(sample: Sample, { kind, step }: Place): Promise<Tokens | null> {
  if (!sample.has_tokens || kind !== "step" || step === null) return null;
  const data = await load<TokensData>(fileOf("tokens", step));
  const columns = data.samples[sample.id];
  return columns ? { ...data, columns } : null;
}

function missing({ kind, step: at }: Place, { overview }: Context): HTMLElement {
  if (kind !== "step" || at === null) return section("Tokens", h("p.empty", "Only trained samples have tokens here."));
  const whole = overview.steps.step.filter((step, index) => step % 8 === 1 && overview.steps.tokens[index]);
  const near = [whole.findLast((step) => step < at), whole.find((step) => step > at)].filter((step) => step !== undefined);
  return section(
    "Tokens",
    h("p.empty", "Tokens are kept of all samples of every eighth step (1, 9, 17, …), and of the eight best and worst samples of the others."),
    near.length > 0 && h("p", "With all tokens: ", near.map((step, index) => [index > 0 && ", ", h("a", { href: link("step", step) }, `step ${step}`)])),
  );
}

/** Numbers of the response's tokens by colour; null where there is none. */
function valuesOf(sample: Sample, { mask, engine, trainer, advantage }: SampleTokens): Record<Colour, Numbers> {
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

/** The colour of each value that a token may have. */
function scaleOf(colour: Colour, values: Numbers): (value: number) => string {
  const { low, high } = spread(values);
  if (colour === "mask") return (value) => (value ? diverging(1, [0, 1], TINT * 0.8) : "transparent");
  if (colour === "engine") return (value) => sequential(-value, [0, Math.max(-low, 1e-9)], TINT_OF_ONE);
  if (colour === "version") return (value) => sequential(value, [low - (high - low || 1) * 0.35, high], TINT_OF_ONE);
  const most = Math.max(Math.abs(low), Math.abs(high)) || 1;
  return (value) => diverging(value, [-most, most], TINT);
}

function tokenSection(sample: Sample, advantages: Numbers, tokens: Tokens, first: Colour, textError: string | null): HTMLElement {
  const { columns, texts, ids } = tokens;
  const values = valuesOf(sample, columns);
  const list = new TokenList(tokens);
  const legend = h("div.token-legend");
  const detail = h("div.token-detail");
  const paint = (colour: Colour): void => {
    lastColour = colour;
    const scale = scaleOf(colour, colour === "advantage" ? [...values.advantage, ...advantages] : values[colour]);
    list.paint((index) => (values[colour][index] == null ? "" : scale(values[colour][index])));
    legend.replaceChildren(...legendOf(colour, values[colour], scale));
  };
  list.chosen = (index) => detail.replaceChildren(...detailOf(index, list.text(index), ids[columns.t[index]!]!, columns, values));
  paint(first);
  detail.append(label("Point at a token, or move with the arrow keys."));
  return section(
    "Tokens",
    texts === null && textError !== null && h("p.verdict.warn", textError),
    h("div.bar.token-tools", choice<Colour>("Colour", COLOURS.map(([key, name]) => [key, name]), first, paint)),
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
  private colourAt: (index: number) => string = () => "";
  private current = -1;

  constructor(private readonly tokens: Tokens) {
    const fillNear = (seen: IntersectionObserverEntry[]): void => {
      for (const { target, isIntersecting } of seen) if (isIntersecting) this.fill(this.blocks.get(target)!);
    };
    const near = new IntersectionObserver(fillNear, { root: this.element, rootMargin: "300px" });
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

  /** `colourAt` is given the number of a token of the response. */
  paint(colourAt: (index: number) => string): void {
    this.colourAt = colourAt;
    for (const block of this.blocks.values()) this.paintBlock(block);
  }

  private shown(index: number): string {
    return this.tokens.texts ? this.text(index).replace(/\n/g, "↵\n").replace(/\t/g, "→\t") : `${this.text(index)} `;
  }

  private fill(block: Block): void {
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
    spans.forEach((span, at) => (span.style.backgroundColor = this.colourAt(first + at - this.tokens.columns.n)));
  }

  private span(index: number): HTMLElement | undefined {
    const block = this.blockOf[index];
    if (block) this.fill(block);
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

function detailOf(index: number, text: string, id: number, columns: SampleTokens, values: Record<Colour, Numbers>): HTMLElement[] {
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

function legendOf(colour: Colour, values: Numbers, paint: (value: number) => string): HTMLElement[] {
  const explained = h("p.label", COLOURS.find(([each]) => each === colour)![2]);
  const { count, low, high, mean } = spread(values);
  if (!count) return [explained, h("p.label", "This sample has no such numbers.")];
  const key = (name: string, value: number, text: string): HTMLElement =>
    h("span", h("i.key", { style: { "background-color": paint(value) } }), `${name} `, h("b", text));
  if (colour !== "mask" && colour !== "version") {
    const ends = [["lowest", low], ["mean", mean!], ["highest", high]] as const;
    return [h("div.legend", ends.map(([name, value]) => key(name, value, number(value, 4)))), explained];
  }
  const name = (value: number): string => (colour === "version" ? `version ${value}` : value ? "trained" : "not trained");
  const tokensOf = Map.groupBy(values.filter((value) => value !== null), (value) => value);
  const found = [...tokensOf].sort(([a], [b]) => a - b);
  return [h("div.legend", found.map(([value, tokens]) => key(name(value), value, number(tokens.length)))), explained];
}
