// Lists of groups: those of a step, of an evaluation, and those that were not trained.
import type { EvaluationData, Group, Overview, StepData } from "./data";
import { fileOf } from "./data";
import { append, choice, h, VirtualList } from "./dom";
import { badge, count, type Domain, fact, link, number, rewardDomain, rewardStrip, spread, tellingLine } from "./format";
import { load, loaded } from "./load";
import type { Context, Route, View } from "./view";

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

export function wordsOf(place: Place): (string | number)[] {
  return place.kind === "untrained" ? [place.kind] : [place.kind, place.step];
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
const ORDERS: [Order, string][] = [["order", ""], ["low", "lowest"], ["high", "highest"], ["spread", "most mixed"]];

const FIRST_ORDER = { step: "as trained", evaluation: "as asked", untrained: "newest" };

function inOrder(groups: PlacedGroup[], order: Order): PlacedGroup[] {
  if (order === "order") return groups;
  const key = new Map(
    groups.map((each) => {
      const { mean, deviation } = spread(each.group.samples.map((sample) => sample.reward));
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
  for (const { group } of all) {
    const reason = place.kind === "untrained" ? reasonOf(group)?.reason : undefined;
    if (reason !== undefined) reasons.set(reason, (reasons.get(reason) ?? 0) + group.samples.length);
  }
  const order = ORDERS.find(([key]) => key === query.get("order"))?.[0] ?? "order";
  const reason = query.get("reason") ?? "";
  const groups = inOrder(reason ? all.filter((each) => reasonOf(each.group)?.reason === reason) : all, order);
  const domain = rewardDomain(all.map((each) => each.group));
  const sets = new Set(all.map((each) => each.set));
  const list = new VirtualList<PlacedGroup>(
    context.content,
    (each) => groupRow(each, place, domain, sets.size > 1),
    `Groups of ${nameOf(place)}`,
    "groups",
  );
  const change = (name: string, value: string): void => context.go(changed(link(...wordsOf(place)), query, name, value), true);
  const around: { previous?: string; next?: string } = place.kind === "untrained" ? {} : neighbours(place, overview);
  const heads = [place.kind === "untrained" ? "version" : "group", "prompt", "rewards", "mean", "spread"];
  const element = h(
    "div",
    { class: "page" },
    h("div", { class: "bar" }, h("h1", {}, nameOf(place)), place.kind !== "untrained" && pagerOf(around.previous, around.next, place.kind)),
    summary(place, all, overview),
    h(
      "div",
      { class: "bar tools" },
      all.length > 1 && choice("Order", [["order", FIRST_ORDER[place.kind]], ...ORDERS.slice(1)], order, (value) => change("order", value)),
      reasons.size > 0 && reasonPicker(reasons, reason, (value) => change("reason", value)),
    ),
    groups.length > 0
      ? h("div", { class: "head groups", "aria-hidden": "true" }, heads.map((name) => h("span", {}, name)))
      : h("p", { class: "empty" }, place.kind === "untrained" ? "Every group was trained: none failed, and no filter dropped one." : "No groups."),
    list.element,
  );
  return { title: nameOf(place), element, shown: () => list.show(groups), left: list.close, ...sideOf(place), ...around };
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

function neighbours(place: { kind: "step" | "evaluation"; step: number }, overview: Overview): { previous?: string; next?: string } {
  const steps = place.kind === "step" ? overview.steps.step : overview.evals;
  const at = steps.indexOf(place.step);
  const [before, after] = [steps[at - 1], steps[at + 1]];
  return {
    ...(before === undefined ? {} : { previous: link(place.kind, before) }),
    ...(after === undefined ? {} : { next: link(place.kind, after) }),
  };
}

/** Links to the things before and after. */
export function pagerOf(previous: string | undefined, next: string | undefined, noun: string): HTMLElement {
  const to = (href: string | undefined, sign: string, label: string): HTMLElement =>
    href === undefined ? h("span", { class: "button off", "aria-hidden": "true" }, sign) : h("a", { class: "button", href, "aria-label": label }, sign);
  return h("span", { class: "pager" }, to(previous, "‹", `Previous ${noun}`), to(next, "›", `Next ${noun}`));
}

function summary(place: Place, groups: PlacedGroup[], overview: Overview): HTMLElement {
  const samples = groups.flatMap(({ group }) => group.samples);
  const { mean, deviation } = spread(samples.map((sample) => sample.reward));
  const words = h("p", { class: "summary" });
  append(words, [h("span", {}, `${count(groups.length, "group")}, ${count(samples.length, "sample")}`)]);
  if (place.kind === "untrained")
    append(words, [fact("failed", number(overview.untrained.failed)), fact("filtered", number(overview.untrained.filtered))]);
  append(words, [mean !== null && fact("mean reward", number(mean)), deviation !== null && fact("spread", number(deviation))]);
  if (place.kind === "step") {
    const at = overview.metrics.step.indexOf(place.step);
    for (const name of ["entropy", "grad_norm", "response_length/mean", "staleness/mean"]) {
      const value = overview.metrics.columns[name]?.[at];
      if (value !== null && value !== undefined) append(words, [fact(name, number(value))]);
    }
  }
  if (place.kind === "evaluation") {
    for (const name of new Set(groups.map((each) => each.set))) {
      const rewards = groups.filter((each) => each.set === name).flatMap((each) => each.group.samples.map((sample) => sample.reward));
      append(words, [fact(name ?? "", number(spread(rewards).mean))]);
    }
  }
  return words;
}

function reasonPicker(reasons: Map<string, number>, chosen: string, pick: (reason: string) => void): HTMLElement {
  const select = h(
    "select",
    { name: "reason", "aria-label": "Reason", change: () => pick(select.value) },
    h("option", { value: "" }, "every reason"),
    [...reasons].map(([reason, samples]) => h("option", { value: reason, selected: reason === chosen }, `${reason} (${number(samples)})`)),
  );
  return select;
}

/** One line: the prompt, and the rewards of its samples. */
export function groupRow({ group, key, set }: PlacedGroup, place: Place, domain: Domain, showSet = false): HTMLElement {
  const { mean, deviation } = spread(group.samples.map((sample) => sample.reward));
  const failed = group.samples.filter((sample) => sample.failure).length;
  const dropped = group.samples.find((sample) => sample.dropped !== null)?.dropped;
  return h(
    "a",
    { class: "row groups", href: link(...wordsOf(place), "group", key) },
    h("span", { class: "number" }, place.kind === "untrained" ? (group.version ?? "–") : key),
    h(
      "span",
      { class: "prompt" },
      showSet && set !== null && badge(set),
      failed > 0 && badge(failed === group.samples.length ? "failed" : `${failed} failed`, "bad"),
      dropped != null && badge(dropped ? `dropped: ${dropped}` : "dropped", "warn"),
      h("bdi", {}, tellingLine(group.prompt)),
    ),
    h("span", { class: "rewards" }, rewardStrip(group.samples, domain)),
    h("span", { class: "mean" }, number(mean)),
    h("span", { class: "spread" }, deviation === null ? "–" : `±${number(deviation)}`),
  );
}
