// Prompts over the steps: which ones rise, and what was written to one of them step by step.
import { Crosshair, curveFigure } from "./chart";
import type { Prompts } from "./data";
import { choice, h, label, moreButton, VirtualList } from "./dom";
import { badge, count, firstLine, link, number, rewardChip, rewardDomain, rewardStrip, sparkline, spread, tellingLine } from "./format";
import { groupsOf, pagerOf } from "./groups";
import { load } from "./load";
import type { Context, Route, View } from "./view";

type Order = "order" | "often" | "low" | "rise" | "fall";
const ORDERS: [Order, string][] = [
  ["order", "first"],
  ["often", "most often"],
  ["low", "lowest"],
  ["rise", "rising"],
  ["fall", "falling"],
];

interface Row {
  index: number;
  text: string;
  means: (number | null)[];
  key: Record<Order, number>;
}

let rows: { of: Prompts; rows: Row[] } | null = null;

function rowsOf(prompts: Prompts): Row[] {
  if (rows?.of === prompts) return rows.rows;
  const made = prompts.texts.map((text, index) => {
    const means = prompts.at[index]!.map(([, , mean]) => mean);
    const scored = means.filter((mean) => mean !== null);
    const rise = scored.length > 1 ? scored.at(-1)! - scored[0]! : 0;
    const low = spread(means).mean ?? Infinity;
    return { index, text, means, key: { order: index, often: -means.length, low, rise: -rise, fall: rise } };
  });
  rows = { of: prompts, rows: made };
  return made;
}

export async function promptsView({ query }: Route, context: Context): Promise<View> {
  const prompts = await load<Prompts>("prompts");
  const order = ORDERS.find(([key]) => key === query.get("order"))?.[0] ?? "order";
  const shown = rowsOf(prompts).toSorted((a, b) => a.key[order] - b.key[order] || a.index - b.index);
  const list = new VirtualList<Row>(context.content, promptRow, "Prompts", "prompts");
  const element = h(
    "div",
    { class: "page" },
    h("div", { class: "bar" }, h("h1", {}, "Prompts")),
    h("p", { class: "summary" }, h("span", {}, `${count(shown.length, "prompt")}. The same prompt is trained again when the data begin anew.`)),
    h("div", { class: "bar tools" }, choice<Order>("Order", ORDERS, order, (value) => context.go(`#/prompts?order=${value}`, true))),
    h("div", { class: "head prompts", "aria-hidden": "true" }, ["prompt", "steps", "mean reward", "last"].map((name) => h("span", {}, name))),
    list.element,
  );
  return { title: "Prompts", element, shown: () => list.show(shown), left: list.close };
}

function promptRow({ index, text, means }: Row): HTMLElement {
  return h(
    "a",
    { class: "row prompts", href: link("prompt", index) },
    h("span", { class: "prompt" }, h("bdi", {}, tellingLine(text))),
    h("span", { class: "mean" }, means.length),
    h("span", { class: "rewards" }, sparkline(means, 110, 22, `mean rewards ${means.slice(0, 20).map((mean) => number(mean)).join(", ")}`)),
    h("span", { class: "mean" }, number(means.findLast((mean) => mean !== null))),
  );
}

const RESPONSES = 8;
const STEPS_AT_ONCE = 12;

export async function promptView({ words }: Route, context: Context): Promise<View> {
  const prompts = await load<Prompts>("prompts");
  const index = Number(words[1]);
  const [text, at] = [prompts.texts[index], prompts.at[index]];
  if (text === undefined || !at) throw new Error(`There is no prompt ${words[1]}. There are ${prompts.texts.length}.`);
  const steps = at.map(([step]) => step);
  const frame = {
    crosshair: new Crosshair(),
    steps: [steps[0] ?? 0, steps.at(-1) ?? 0] as [number, number],
    marks: [],
    open: (step: number) => context.go(link("step", step, "group", at.find(([each]) => each === step)?.[1] ?? 0)),
  };
  const curve = { name: "mean reward", step: steps, values: at.map(([, , mean]) => mean), hasPoints: true };
  const list = h("div", { class: "visits" });
  const [previous, next] = [index > 0 ? link("prompt", index - 1) : undefined, index + 1 < prompts.texts.length ? link("prompt", index + 1) : undefined];
  const element = h(
    "div",
    { class: "page" },
    h("p", { class: "crumbs" }, h("a", { href: "#/prompts" }, "Prompts")),
    h("div", { class: "bar" }, h("h1", {}, `Prompt ${index}`), pagerOf(previous, next, "prompt")),
    h("div", { class: "text prompt-text" }, text, text.length >= 200 && label(" …")),
    h("p", { class: "summary" }, h("span", {}, `Trained in ${count(new Set(steps).size, "step")}`)),
    at.length > 1 && h("div", { class: "curves" }, curveFigure(curve.name, [curve], frame)),
    list,
  );
  let isLeft = false;
  const show = async (from: number): Promise<void> => {
    for (const [step, number] of at.slice(from, from + STEPS_AT_ONCE)) {
      const section = await visit(step, number, context);
      if (isLeft) return;
      list.append(section);
    }
    const left = at.length - from - STEPS_AT_ONCE;
    if (left > 0) list.append(moreButton(left, STEPS_AT_ONCE, "steps", () => void show(from + STEPS_AT_ONCE)));
  };
  return { title: `Prompt ${index}`, element, previous, next, parent: "#/prompts", shown: () => void show(0), left: () => void (isLeft = true) };
}

/** What was written to the prompt in one step. */
async function visit(step: number, number: number, context: Context): Promise<HTMLElement> {
  const title = h("a", { href: link("step", step, "group", number) }, `Step ${step}`);
  try {
    const { group } = (await groupsOf({ kind: "step", step }, context.overview))[number]!;
    const domain = rewardDomain([group]);
    const texts = new Map<string, typeof group.samples>();
    for (const sample of group.samples) texts.set(sample.response, [...(texts.get(sample.response) ?? []), sample]);
    const common = [...texts].sort(([, a], [, b]) => b.length - a.length);
    return h(
      "section",
      { "aria-label": `Step ${step}` },
      h("h2", {}, title, rewardStrip(group.samples, domain)),
      h(
        "ul",
        { class: "responses" },
        common.slice(0, RESPONSES).map(([response, [sample, ...others]]) =>
          h(
            "li",
            {},
            rewardChip(sample!.reward, domain),
            h("a", { href: link("step", step, "sample", sample!.id) }, h("bdi", {}, firstLine(response)), lastLine(response)),
            others.length > 0 && badge(`× ${others.length + 1}`),
          ),
        ),
        common.length > RESPONSES && h("li", { class: "label" }, `and ${common.length - RESPONSES} other texts`),
      ),
    );
  } catch (error) {
    return h("section", {}, h("h2", {}, title), h("p", { class: "empty" }, String((error as Error).message)));
  }
}

/** The end of a response of several lines: often its answer. */
function lastLine(text: string): HTMLElement | false {
  const lines = text.trim().split("\n");
  return lines.length > 1 && h("bdi", { class: "end" }, ` … ${lines.at(-1)!.slice(-60)}`);
}

/** Finds the prompt of a group of a step, and goes there. */
export async function promptOfView({ words }: Route, context: Context): Promise<View> {
  const [step, number] = [Number(words[1]), Number(words[2])];
  const prompts = await load<Prompts>("prompts");
  const index = prompts.at.findIndex((at) => at.some(([each, group]) => each === step && group === number));
  if (index < 0) throw new Error(`No prompt is known of group ${number} in step ${step}.`);
  context.go(link("prompt", index), true);
  return { title: "Prompt", element: h("div") };
}
