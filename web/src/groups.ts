// Lists of groups: those of a step, of an evaluation, and those that were not trained.
import type { Group, Groups, Overview } from "./data";
import { fileOf } from "./data";
import { choice, h, select, VirtualList } from "./dom";
import { badge, count, type Domain, fact, link, number, rewardDomain, rewardsOf, rewardStrip, spread, tellingLine } from "./format";
import { load, loaded } from "./load";
import { type Context, neighbours, page, type Route, type View } from "./view";

export interface Place {
  kind: "step" | "evaluation" | "untrained";
  step: number | null; // of untrained groups: none
}

export interface PlacedGroup {
  group: Group;
  key: string; // of its link: its number, or its id where numbers move
}

export function placeOf([kind, step = ""]: string[]): Place {
  if (kind === "untrained") return { kind, step: null };
  if ((kind === "step" || kind === "evaluation") && /^\d{1,15}$/.test(step)) return { kind, step: Number(step) };
  throw new Error("There is no page for this link. Choose one above.");
}

/** The link of a place, or of something in it. */
export function linkOf({ kind, step }: Place, ...words: string[]): string {
  return link(kind, ...(step === null ? [] : [step]), ...words);
}

export function nameOf({ kind, step }: Place): string {
  return { step: `Step ${step}`, evaluation: `Evaluation after step ${step}`, untrained: "Untrained" }[kind];
}

function fileFor({ kind, step }: Place): string {
  return step === null ? "untrained" : fileOf(kind === "step" ? "step" : "eval", step);
}

/** The steps that have such a place. */
function stepsWith({ kind }: Place, { steps, evals }: Overview): number[] {
  return { step: steps.step, evaluation: evals, untrained: [] }[kind];
}

export async function groupsOf(place: Place, overview: Overview): Promise<PlacedGroup[]> {
  const steps = stepsWith(place, overview);
  if (place.step === null && !overview.untrained.failed && !overview.untrained.filtered) return [];
  if (place.step !== null && !steps.includes(place.step)) {
    const range = steps.length ? `It has ${steps[0]} to ${steps.at(-1)}.` : "It has none.";
    throw new Error(`This page has no samples of ${place.kind} ${place.step}. ${range}`);
  }
  await load(fileFor(place));
  return loadedGroups(place);
}

/** The groups of a file that is in memory. */
export function loadedGroups(place: Place): PlacedGroup[] {
  const groups = loaded<Groups>(fileFor(place))?.groups ?? [];
  return groups.map((group, index) => ({ group, key: place.step === null ? group.id : String(index) }));
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

function ordersOf({ kind }: Place): [Order, string][] {
  const first = { step: "as trained", evaluation: "as asked", untrained: "newest" }[kind];
  return [["order", first], ["low", "lowest"], ["high", "highest"], ["spread", "most mixed"]];
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
  const domain = rewardDomain(all.flatMap(({ group }) => rewardsOf(group)));
  const hasSets = new Set(all.map(({ group }) => group.set)).size > 1;
  const list = new VirtualList<PlacedGroup>(context.content, (each) => groupRow(each, place, domain, hasSets), `Groups of ${nameOf(place)}`, "groups");
  const change = (name: string, value: string): void => context.go(changed(linkOf(place), query, name, value), true);
  const counts = [...reasons].map(([reason, samples]): [string, string] => [reason, `${reason} (${number(samples)})`]);
  const none = place.kind === "untrained" ? "Every group was trained: none failed, and no filter dropped one." : "No groups.";
  const heads = [place.kind === "untrained" ? "version" : "group", "prompt", "rewards", "mean", "spread"];
  const steps = stepsWith(place, overview);
  const at = steps.indexOf(place.step ?? -1);
  const next = steps[at + 1];
  const view = page(
    { title: nameOf(place), noun: place.step === null ? undefined : place.kind, ...neighbours(steps, at, (step) => link(place.kind, step)) },
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
    if (next !== undefined) void load(fileFor({ ...place, step: next })).catch(() => null); // its own page says what is wrong
  };
  return { ...view, shown, ...sideOf(place) };
}

/** The list that stands beside everything of a step or an evaluation. */
export function sideOf({ kind, step }: Place): Pick<View, "side"> {
  return step === null ? {} : { side: { kind: kind === "step" ? "steps" : "evaluations", chosen: step } };
}

/** The link with another choice in it. */
export function changed(href: string, query: URLSearchParams, name: string, value: string): string {
  const next = new URLSearchParams(query);
  next.set(name, value);
  return `${href}?${next}`;
}

const STEP_FACTS = ["entropy", "grad_norm", "response_length/mean", "staleness/mean"];

function summary(place: Place, groups: PlacedGroup[], overview: Overview): HTMLElement {
  const rewards = groups.flatMap(({ group }) => rewardsOf(group));
  const { mean, deviation } = spread(rewards);
  const facts: [string, number | null | undefined][] = [];
  if (place.kind === "untrained") facts.push(["failed", overview.untrained.failed], ["filtered", overview.untrained.filtered]);
  facts.push(["mean reward", mean], ["spread", deviation]);
  if (place.kind === "step") {
    const at = overview.metrics.step.indexOf(place.step ?? -1);
    facts.push(...STEP_FACTS.map((name): [string, number | null | undefined] => [name, overview.metrics.columns[name]?.[at]]));
  }
  for (const [set, ofSet] of Map.groupBy(groups, ({ group }) => group.set))
    if (set !== null) facts.push([set, spread(ofSet.flatMap(({ group }) => rewardsOf(group))).mean]);
  const known = facts.filter(([, value]) => value !== null && value !== undefined);
  const counts = `${count(groups.length, "group")}, ${count(rewards.length, "sample")}`;
  return h("p.summary", h("span", counts), known.map(([name, value]) => fact(name, number(value))));
}

/** One line: the prompt, and the rewards of its samples. */
export function groupRow({ group, key }: PlacedGroup, place: Place, domain: Domain, showSet = false): HTMLElement {
  const { mean, deviation } = spread(rewardsOf(group));
  const failed = group.samples.filter((sample) => sample.failure).length;
  const dropped = group.samples.find((sample) => sample.dropped !== null)?.dropped;
  return h(
    "a.row.groups",
    { href: linkOf(place, "group", key) },
    h("span.number", place.kind === "untrained" ? (group.version ?? "–") : key),
    h(
      "span.prompt",
      showSet && group.set !== null && badge(group.set),
      failed > 0 && badge(failed === group.samples.length ? "failed" : `${failed} failed`, "bad"),
      dropped != null && badge(dropped ? `dropped: ${dropped}` : "dropped", "warn"),
      h("bdi", tellingLine(group.prompt)),
    ),
    h("span.rewards", rewardStrip(group.samples, domain)),
    h("span.mean", number(mean)),
    h("span.spread", deviation === null ? "–" : `±${number(deviation)}`),
  );
}
