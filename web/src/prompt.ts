// Prompts over the steps: which ones rise, and what was written to one of them step by step.
import { curveFigure, type Frame } from "./chart";
import type { Numbers, Prompts } from "./data";
import { append, choice, h, label, shownInParts, VirtualList } from "./dom";
import { badge, count, firstLine, link, number, rewardChip, rewardDomain, rewardsOf, rewardStrip, sparkline, spread, tellingLine } from "./format";
import { writtenBy } from "./group";
import { groupsOf } from "./groups";
import { load } from "./load";
import { type Context, neighbours, page, type Route, type View } from "./view";

type Order = "order" | "often" | "low" | "rise" | "fall";
const ORDERS: [Order, string][] = [
  ["order", "first"],
  ["often", "most often"],
  ["low", "lowest"],
  ["rise", "rising"],
  ["fall", "falling"],
];

function meansOf(prompts: Prompts, index: number): Numbers {
  return prompts.at[index]!.map(([, , mean]) => mean);
}

/** What prompts are sorted by, the smallest first. */
function keyOf(order: Order, means: Numbers): number {
  if (order === "often") return -means.length;
  if (order === "low") return spread(means).mean ?? Infinity;
  const scored = means.filter((mean) => mean !== null);
  const rise = scored.length > 1 ? scored.at(-1)! - scored[0]! : 0;
  return order === "rise" ? -rise : rise;
}

function inOrder(prompts: Prompts, order: Order): number[] {
  const all = prompts.texts.map((_, index) => index);
  if (order === "order") return all;
  const keys = all.map((index) => keyOf(order, meansOf(prompts, index)));
  return all.sort((a, b) => keys[a]! - keys[b]!);
}

export async function promptsView({ query }: Route, context: Context): Promise<View> {
  const prompts = await load<Prompts>("prompts");
  const order = ORDERS.find(([key]) => key === query.get("order"))?.[0] ?? "order";
  const shown = inOrder(prompts, order);
  const list = new VirtualList<number>(context.content, (index) => promptRow(prompts, index), "Prompts", "prompts");
  const view = page(
    { title: "Prompts" },
    h("p.summary", `${count(shown.length, "prompt")}. The same prompt is trained again when the data begin anew.`),
    h("div.bar.tools", choice<Order>("Order", ORDERS, order, (value) => context.go(`#/prompts?order=${value}`, true))),
    h("div.head.prompts", { "aria-hidden": "true" }, ["prompt", "steps", "mean reward", "last"].map((name) => h("span", name))),
    list.element,
  );
  return { ...view, shown: () => list.show(shown) };
}

function promptRow(prompts: Prompts, index: number): HTMLElement {
  const means = meansOf(prompts, index);
  return h(
    "a.row.prompts",
    { href: link("prompt", index) },
    h("span.prompt", h("bdi", tellingLine(prompts.texts[index]!))),
    h("span.mean", means.length),
    h("span.rewards", sparkline(means, 110, 22, `mean rewards ${means.slice(0, 20).map((mean) => number(mean)).join(", ")}`)),
    h("span.mean", number(means.findLast((mean) => mean !== null))),
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
  const frame: Frame = {
    crosshair: [],
    steps: [steps[0] ?? 0, steps.at(-1) ?? 0],
    marks: [],
    open: (step) => context.go(link("step", step, "group", at.find(([each]) => each === step)?.[1] ?? 0)),
  };
  const curve = { name: "mean reward", step: steps, values: meansOf(prompts, index), hasPoints: true };
  const list = h("div.visits");
  const view = page(
    {
      title: `Prompt ${index}`,
      above: [["#/prompts", "Prompts"]],
      noun: "prompt",
      ...neighbours(prompts.texts.map((_, each) => each), index, (each) => link("prompt", each)),
    },
    h("div.text.box", text, text.length >= 200 && label(" …")),
    h("p.summary", `Trained in ${count(new Set(steps).size, "step")}`),
    at.length > 1 && h("div.curves", curveFigure(curve.name, [curve], frame)),
    list,
  );
  const fill = async (sections: HTMLElement[], from: number): Promise<void> => {
    for (const [index, section] of sections.entries()) {
      const [step, number] = at[from + index]!;
      if (section.isConnected) await visit(section, step, number, context);
    }
  };
  const shown = (): void =>
    shownInParts(list, at.length, STEPS_AT_ONCE, "steps", (from, to) => {
      const sections = steps.slice(from, to).map((step) => h("section", { "aria-label": `Step ${step}` }));
      list.append(...sections);
      void fill(sections, from);
    });
  return { ...view, shown };
}

/** Shows what was written to the prompt in one step. */
async function visit(section: HTMLElement, step: number, number: number, context: Context): Promise<void> {
  const title = h("a", { href: link("step", step, "group", number) }, `Step ${step}`);
  try {
    const { group } = (await groupsOf({ kind: "step", step }, context.overview))[number]!;
    const domain = rewardDomain(rewardsOf(group));
    const samplesWith = Map.groupBy(group.samples, writtenBy);
    const common = [...samplesWith].sort(([, a], [, b]) => b.length - a.length);
    const rows = common.slice(0, RESPONSES).map(([text, [sample, ...others]]) =>
      h(
        "li",
        rewardChip(sample!.reward, domain),
        h("a", { href: link("step", step, "sample", sample!.id) }, h("bdi", firstLine(text)), lastLine(text)),
        others.length > 0 && badge(`× ${others.length + 1}`),
      ),
    );
    const more = common.length > RESPONSES && h("li.label", `and ${common.length - RESPONSES} other texts`);
    append(section, [h("h2", title, rewardStrip(group.samples, domain)), h("ul.responses", rows, more)]);
  } catch (error) {
    append(section, [h("h2", title), h("p.empty", (error as Error).message)]);
  }
}

/** The end of a response of several lines: often its answer. */
function lastLine(text: string): HTMLElement | false {
  const lines = text.trim().split("\n");
  return lines.length > 1 && h("bdi.end", ` … ${lines.at(-1)!.slice(-60)}`);
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
