// Groups: a table of those of a step, and one with its samples side by side.

import { reward as rewardColor } from "./colors";
import { count, firstLine, h, mean, number, spread, text, virtualList } from "./dom";
import type { Group, Sample, Turn } from "./data";

/** A step, an evaluation, or what was not trained. */
export type Collection = { title: string; base: string; up: string; groups: Group[]; step: number | null };

type Order = "number" | "mean" | "spread" | "length";
type Wanted = "all" | "mixed" | "equal";
let order: Order = "number";
let wanted: Wanted = "all";

const rewards = (group: Group) => group.samples.flatMap((sample) => sample.reward ?? []);
const lengths = (group: Group) => mean(group.samples.map((sample) => sample.response_tokens)) ?? 0;

export function bounds(groups: Group[]): [number, number] {
  const values = groups.flatMap(rewards);
  return values.length ? [Math.min(...values), Math.max(...values)] : [0, 1];
}

const KEYS: Record<Order, (group: Group) => number> = {
  number: () => 0,
  mean: (group) => mean(rewards(group)) ?? Infinity,
  spread: (group) => -(spread(rewards(group)) ?? 0),
  length: (group) => -lengths(group),
};

export function groupsView(collection: Collection): HTMLElement {
  const [low, high] = bounds(collection.groups);
  const holder = h("div", { class: "holder" });
  const draw = () => {
    const shown = collection.groups
      .map((group, index) => ({ group, index }))
      .filter(({ group }) => wanted === "all" || (wanted === "mixed") === (spread(rewards(group)) ?? 0) > 0)
      .sort((a, b) => KEYS[order](a.group) - KEYS[order](b.group) || a.index - b.index);
    const list = virtualList("Groups", shown.length, 44, (row) => groupRow(collection, shown[row].group, shown[row].index, low, high));
    holder.replaceChildren(shown.length ? list.element : h("p", { class: "quiet" }, "No group is like this."));
  };
  draw();
  const samples = collection.groups.reduce((sum, group) => sum + group.samples.length, 0);
  return h(
    "div",
    { class: "page tall" },
    h("h1", {}, collection.title),
    h(
      "div",
      { class: "tools" },
      h("span", {}, `${count(collection.groups.length)} groups, ${count(samples)} samples, mean reward ${number(mean(collection.groups.flatMap(rewards)))}`),
      choice<Order>("Order", { number: "as trained", mean: "lowest reward", spread: "largest spread", length: "longest" }, order, (value) => ((order = value), draw())),
      choice<Wanted>("Show", { all: "all", mixed: "with a spread", equal: "equal rewards" }, wanted, (value) => ((wanted = value), draw())),
    ),
    holder,
  );
}

export function choice<T extends string>(label: string, options: Record<T, string>, value: T, change: (value: T) => void): HTMLElement {
  const select = h("select", { onchange: () => change(select.value as T) }, ...(Object.entries(options) as [T, string][]).map(([key, name]) => h("option", { value: key, selected: key === value }, name)));
  return h("label", {}, `${label} `, select);
}

function groupRow(collection: Collection, group: Group, index: number, low: number, high: number): HTMLElement {
  const values = rewards(group);
  const dots = group.samples.map((sample) => dot(sample, low, high));
  return h(
    "a",
    { class: "group-row", href: `${collection.base}/group/${index}` },
    h("span", { class: "num" }, String(index)),
    h("span", { class: "prompt", dir: "auto" }, firstLine(group.prompt)),
    h("span", { class: "dots", "aria-label": `rewards ${values.map((value) => number(value)).join(", ")}`, role: "img" }, ...dots),
    h("span", { class: "num wide" }, number(mean(values))),
    h("span", { class: "num wide quiet" }, values.length ? `± ${number(spread(values), 2)}` : ""),
    badge(group),
  );
}

function dot(sample: Sample, low: number, high: number): HTMLElement {
  const element = h("i", { class: sample.failure ? "dot failed" : "dot" });
  element.style.background = rewardColor(sample.reward, low, high);
  return element;
}

function badge(group: Group): HTMLElement {
  const failed = group.samples.filter((sample) => sample.failure).length;
  const dropped = group.samples.find((sample) => sample.dropped)?.dropped;
  if (dropped) return h("span", { class: "badge", title: dropped }, "filtered");
  return failed ? h("span", { class: "badge bad" }, `${failed} failed`) : h("span", { class: "badge none" });
}

type By = "index" | "best" | "worst" | "longest";
let by: By = "index";
const BY: Record<By, (sample: Sample) => number> = {
  index: (sample) => sample.index,
  best: (sample) => -(sample.reward ?? -Infinity),
  worst: (sample) => sample.reward ?? Infinity,
  longest: (sample) => -sample.response_tokens,
};

export function groupView(collection: Collection, index: number): HTMLElement {
  const group = collection.groups[index];
  if (!group) return h("div", { class: "page" }, h("h1", {}, "No such group"), h("p", {}, `${collection.title} has ${collection.groups.length} groups.`));
  const [low, high] = bounds(collection.groups);
  const values = rewards(group);
  const holder = h("div", { class: "samples", tabindex: "0", role: "region", "aria-label": "Samples side by side" });
  const draw = () => holder.replaceChildren(...[...group.samples].sort((a, b) => BY[by](a) - BY[by](b) || a.index - b.index).map((sample) => card(collection, sample, low, high)));
  draw();
  const dropped = group.samples.find((sample) => sample.dropped)?.dropped;
  return h(
    "div",
    { class: "page tall" },
    h("h1", {}, h("a", { href: collection.base }, collection.title), ` · group ${index}`),
    h(
      "div",
      { class: "tools" },
      h("span", { class: "mono" }, group.id),
      h("span", {}, `mean reward ${number(mean(values))} ± ${number(spread(values), 2)}`),
      group.label === null ? null : h("span", { dir: "auto" }, `label ${group.label}`),
      h("span", { class: "steppers" }, stepper(collection, index - 1, "previous"), stepper(collection, index + 1, "next")),
      choice<By>("Order", { index: "as sampled", best: "best first", worst: "worst first", longest: "longest first" }, by, (value) => ((by = value), draw())),
    ),
    dropped ? h("p", { class: "why" }, `A filter dropped this group: ${dropped}`) : null,
    h("details", { class: "asked", open: group.prompt.length < 600 }, h("summary", {}, "Prompt"), text(group.prompt)),
    holder,
  );
}

function stepper(collection: Collection, index: number, name: string): HTMLElement {
  const there = index >= 0 && index < collection.groups.length;
  return there ? h("a", { href: `${collection.base}/group/${index}`, class: name }, name) : h("span", { class: "quiet" }, name);
}

function card(collection: Collection, sample: Sample, low: number, high: number): HTMLElement {
  const element = h("article", { class: "sample" }, summary(sample, low, high), conversation(sample), sampleLink(collection, sample));
  return element;
}

function sampleLink(collection: Collection, sample: Sample): HTMLElement {
  return h("p", { class: "foot" }, h("a", { href: `${collection.base}/sample/${encodeURIComponent(sample.id)}` }, sample.has_tokens ? "tokens" : "this sample"));
}

export function summary(sample: Sample, low: number, high: number): HTMLElement {
  const strip = h("i", { class: "strip" });
  strip.style.background = rewardColor(sample.reward, low, high);
  const parts = Object.entries(sample.parts).map(([name, value]) => `${name} ${number(value)}`);
  return h(
    "header",
    {},
    strip,
    h("div", { class: "big" }, h("strong", {}, sample.reward === null ? "no reward" : number(sample.reward)), h("span", { class: "quiet" }, `sample ${sample.index}`), sample.status === "completed" ? null : h("span", { class: sample.failure ? "badge bad" : "badge" }, sample.status)),
    sample.failure ? h("p", { class: "why" }, `${sample.failure[0]}: ${sample.failure[1]}`) : null,
    h("p", { class: "line-of-facts" }, `advantage ${number(sample.advantage)} · ${count(sample.response_tokens)} tokens · version ${versions(sample)}`),
    h(
      "details",
      {},
      h("summary", {}, "more"),
      h(
        "dl",
        { class: "small" },
        ...(parts.length ? pair("parts", parts.join(", ")) : []),
        ...pair("trainer − engine", sample.gap === null ? "–" : `${number(sample.gap, 2)} nats a token`),
        ...pair("tokens", `${count(sample.prompt_tokens)} of the prompt, ${count(sample.trained_tokens)} trained`),
        ...pair("scorer", sample.scorer || "its producer"),
        ...(sample.scorer_version ? pair("its version", sample.scorer_version.replace(/\S*\//, "")) : []),
        ...pair("id", sample.id),
      ),
    ),
  );
}

const versions = (sample: Sample) => [...new Set(sample.ranges.map(([version]) => version))].join(", ") || "–";

const pair = (name: string, value: string) => [h("dt", {}, name), h("dd", {}, value)];

/** The turns, those of tools closed; a sample of one turn is its response. */
export function conversation(sample: Sample): HTMLElement {
  if (sample.turns.length < 2) return text(sample.response || "(empty response)", sample.response ? "text said" : "text quiet");
  return h("div", { class: "turns" }, ...sample.turns.map(turn));
}

function turn(one: Turn): HTMLElement {
  const isPolicy = one.role === "assistant";
  const role = h("summary", {}, h("b", {}, one.role || "?"), h("span", { class: "quiet" }, ` ${count(one.content.length)} characters`));
  return h("details", { class: isPolicy ? "turn policy" : "turn", open: isPolicy || one.role === "user" }, role, text(one.content, isPolicy ? "text said" : "text"));
}
