// Lists of groups: those of a step, of an evaluation, and those that were not trained.
import type { EvaluationData, Group, Overview, StepData } from "./data";
import { fileOf } from "./data";
import { choice, h, select, VirtualList } from "./dom";
import { badge, count, type Domain, fact, link, number, rewardDomain, rewardStrip, spread, tellingLine } from "./format";
import { load, loaded } from "./load";
import { type Context, neighbours, page, type Route, type View } from "./view";

export type Place = { kind: "step" | "evaluation"; step: number } | { kind: "untrained" };

export interface PlacedGroup {
  group: Group;
  key: string; // of its link: its number, or its id where numbers move
  set: string | null; // of an evaluation
}

export function placeOf(words: string[]): Place {
  const [kind, step] = words;
  if (kind === "untrained") return { kind };
  if ((kind === "step" || kind === "evaluation") && /^\d{1,15}$/.test(step ?? "")) return { kind, step: Number(step) };
  throw new Error(`There is no page for this link. Choose one above.`);
}

/** The link of a place, or of something in it. */
export function linkOf(place: Place, ...words: string[]): string {
  return link(place.kind, ...(place.kind === "untrained" ? [] : [place.step]), ...words);
}

export function nameOf(place: Place): string {
  if (place.kind === "untrained") return "Untrained";
  return place.kind === "step" ? `Step ${place.step}` : `Evaluation after step ${place.step}`;
}

function fileFor(place: Place): string {
  if (place.kind === "untrained") return "untrained";
  return fileOf(place.kind === "step" ? "step" : "eval", place.step);
}

export async function groupsOf(place: Place, overview: Overview): Promise<PlacedGroup[]> {
  if (place.kind === "untrained" && !overview.untrained.failed && !overview.untrained.filtered) return [];
  if (place.kind !== "untrained") requireStep(place.kind, place.step, overview);
  return inFile(place, await load(fileFor(place)));
}

/** The groups of a file that is in memory. */
export function loadedGroups(place: Place): PlacedGroup[] {
  const value = loaded<unknown>(fileFor(place));
  return value ? inFile(place, value) : [];
}

function inFile(place: Place, value: unknown): PlacedGroup[] {
  if (place.kind === "evaluation")
    return (value as EvaluationData).sets
      .flatMap(({ name, groups }) => groups.map((group) => ({ group, set: name })))
      .map((each, index) => ({ ...each, key: String(index) }));
  return (value as StepData).groups.map((group, index) => ({ group, set: null, key: place.kind === "step" ? String(index) : group.id }));
}

function requireStep(kind: "step" | "evaluation", step: number, overview: Overview): void {
  const there = kind === "step" ? overview.steps.step : overview.evals;
  if (there.includes(step)) return;
  const range = there.length ? `It has ${there[0]} to ${there.at(-1)}.` : "It has none.";
  throw new Error(`This page has no samples of ${kind} ${step}. ${range}`);
}

/** Why a group was not trained; null for one that was. */
export function reasonOf(group: Group): { kind: "failed" | "filtered"; reason: string; message: string } | null {
  for (const sample of group.samples) {
    if (sample.dropped !== null) return { kind: "filtered", reason: sample.dropped, message: "" };
    if (sample.failure) return { kind: "failed", reason: sample.failure[0], message: sample.failure[1] };
  }
  return null;
}

type Order = "order" | "low" | "high" | "spread";
const FIRST_ORDER = { step: "as trained", evaluation: "as asked", untrained: "newest" };

function ordersOf(place: Place): [Order, string][] {
  return [["order", FIRST_ORDER[place.kind]], ["low", "lowest"], ["high", "highest"], ["spread", "most mixed"]];
}

function inOrder(groups: PlacedGroup[], order: Order): PlacedGroup[] {
  if (order === "order") return groups;
  const key = new Map(
    groups.map((each) => {
      const { mean, deviation } = spread(rewardsOf(each.group));
      const value = order === "spread" ? deviation : mean;
      return [each, value === null ? Infinity : order === "low" ? value : -value];
    }),
  );
  return groups.toSorted((a, b) => key.get(a)! - key.get(b)!);
}

export function rewardsOf(group: Group): (number | null)[] {
  return group.samples.map((sample) => sample.reward);
}

export async function placeView({ words, query }: Route, context: Context): Promise<View> {
  const place = placeOf(words);
  const { overview } = context;
  const all = await groupsOf(place, overview);
  const reasons = new Map<string, number>();
  for (const { group } of place.kind === "untrained" ? all : []) {
    const { reason } = reasonOf(group) ?? {};
    if (reason !== undefined) reasons.set(reason, (reasons.get(reason) ?? 0) + group.samples.length);
  }
  const orders = ordersOf(place);
  const order = orders.find(([key]) => key === query.get("order"))?.[0] ?? "order";
  const reason = query.get("reason") ?? "";
  const groups = inOrder(reason ? all.filter((each) => reasonOf(each.group)?.reason === reason) : all, order);
  const domain = rewardDomain(all.map((each) => each.group));
  const hasSets = new Set(all.map((each) => each.set)).size > 1;
  const list = new VirtualList<PlacedGroup>(context.content, (each) => groupRow(each, place, domain, hasSets), `Groups of ${nameOf(place)}`, "groups");
  const change = (name: string, value: string): void => context.go(changed(linkOf(place), query, name, value), true);
  const counts = [...reasons].map(([reason, samples]): [string, string] => [reason, `${reason} (${number(samples)})`]);
  const none = place.kind === "untrained" ? "Every group was trained: none failed, and no filter dropped one." : "No groups.";
  const heads = [place.kind === "untrained" ? "version" : "group", "prompt", "rewards", "mean", "spread"];
  const around = stepsAround(place, overview);
  const view = page(
    { title: nameOf(place), ...around.links, ...(place.kind === "untrained" ? {} : { noun: place.kind }) },
    summary(place, all, overview),
    h(
      "div.bar.tools",
      all.length > 1 && choice("Order", orders, order, (value) => change("order", value)),
      counts.length > 0 && select("Reason", [["", "every reason"], ...counts], reason, (value) => change("reason", value)),
    ),
    groups.length > 0 ? h("div.head.groups", { "aria-hidden": "true" }, heads.map((name) => h("span", name))) : h("p.empty", none),
    list.element,
  );
  const shown = (): void => {
    list.show(groups);
    for (const place of around.places) void load(fileFor(place)).catch(() => null); // its own page says what is wrong
  };
  return { ...view, shown, left: list.close, ...sideOf(place) };
}

/** The list that stands beside everything of a step or an evaluation. */
export function sideOf(place: Place): Pick<View, "side"> {
  return place.kind === "untrained" ? {} : { side: { kind: place.kind === "step" ? "steps" : "evaluations", chosen: place.step } };
}

/** The link with another choice in it. */
export function changed(href: string, query: URLSearchParams, name: string, value: string): string {
  const next = new URLSearchParams(query);
  next.set(name, value);
  return `${href}?${next}`;
}

/** Links to the steps before and after, and the next one's place: it is loaded before it is asked for. */
function stepsAround(place: Place, overview: Overview): { links: Pick<View, "previous" | "next">; places: Place[] } {
  if (place.kind === "untrained") return { links: {}, places: [] };
  const steps = place.kind === "step" ? overview.steps.step : overview.evals;
  const at = steps.indexOf(place.step);
  const near = [steps[at + 1], steps[at - 1]].filter((step) => step !== undefined);
  return { links: neighbours(steps, at, (step) => link(place.kind, step)), places: near.map((step) => ({ kind: place.kind, step })) };
}

const STEP_FACTS = ["entropy", "grad_norm", "response_length/mean", "staleness/mean"];

function summary(place: Place, groups: PlacedGroup[], overview: Overview): HTMLElement {
  const rewards = groups.flatMap(({ group }) => rewardsOf(group));
  const { mean, deviation } = spread(rewards);
  const facts: [string, number | null | undefined][] = [];
  if (place.kind === "untrained") facts.push(["failed", overview.untrained.failed], ["filtered", overview.untrained.filtered]);
  facts.push(["mean reward", mean], ["spread", deviation]);
  if (place.kind === "step") {
    const at = overview.metrics.step.indexOf(place.step);
    facts.push(...STEP_FACTS.map((name): [string, number | null | undefined] => [name, overview.metrics.columns[name]?.[at]]));
  }
  for (const set of new Set(groups.map((each) => each.set))) {
    const ofSet = groups.filter((each) => each.set === set).flatMap(({ group }) => rewardsOf(group));
    if (set !== null) facts.push([set, spread(ofSet).mean]);
  }
  const known = facts.filter(([, value]) => value !== null && value !== undefined);
  const counts = `${count(groups.length, "group")}, ${count(rewards.length, "sample")}`;
  return h("p.summary", h("span", counts), known.map(([name, value]) => fact(name, number(value))));
}

/** One line: the prompt, and the rewards of its samples. */
export function groupRow({ group, key, set }: PlacedGroup, place: Place, domain: Domain, showSet = false): HTMLElement {
  const { mean, deviation } = spread(rewardsOf(group));
  const failed = group.samples.filter((sample) => sample.failure).length;
  const dropped = group.samples.find((sample) => sample.dropped !== null)?.dropped;
  return h(
    "a.row.groups",
    { href: linkOf(place, "group", key) },
    h("span.number", place.kind === "untrained" ? (group.version ?? "–") : key),
    h(
      "span.prompt",
      showSet && set !== null && badge(set),
      failed > 0 && badge(failed === group.samples.length ? "failed" : `${failed} failed`, "bad"),
      dropped != null && badge(dropped ? `dropped: ${dropped}` : "dropped", "warn"),
      h("bdi", tellingLine(group.prompt)),
    ),
    h("span.rewards", rewardStrip(group.samples, domain)),
    h("span.mean", number(mean)),
    h("span.spread", deviation === null ? "–" : `±${number(deviation)}`),
  );
}
