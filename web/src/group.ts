// A group: the samples of one prompt side by side.
import { compare } from "./compare";
import type { Group, Sample } from "./data";
import { append, choice, folded, h, label, moreButton } from "./dom";
import { badge, count, type Domain, fact, firstLine, link, number, rewardChip, rewardDomain, spread } from "./format";
import { changed, groupsOf, nameOf, pagerOf, type Place, placeOf, type PlacedGroup, reasonOf, sideOf, wordsOf } from "./groups";
import type { Context, Route, View } from "./view";

const CARDS_AT_ONCE = 24;
const CHARACTERS_AT_ONCE = 4_000;
const TURNS_OPEN_AT_ONCE = 6;

type Order = "index" | "reward";

export async function groupView({ words, query }: Route, context: Context): Promise<View> {
  const place = placeOf(words);
  const key = words.at(-1)!;
  const groups = await groupsOf(place, context.overview);
  const at = groups.findIndex((each) => each.key === key);
  if (at < 0) throw new Error(`${nameOf(place)} has no group ${key}. It has ${count(groups.length, "group")}.`);
  const { group, set } = groups[at]!;
  const domain = rewardDomain(groups.map((each) => each.group));
  const order: Order = query.get("order") === "reward" ? "reward" : "index";
  const samples = order === "index" ? group.samples : group.samples.toSorted((a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity));
  const reference = referenceOf(group, query.get("with"));
  const change = (name: string, value: string): void => context.go(changed(link(...wordsOf(place), "group", key), query, name, value), true);
  const to = (each: PlacedGroup | undefined): string | undefined => each && link(...wordsOf(place), "group", each.key);
  const title = place.kind === "untrained" ? `Group ${group.id}` : `Group ${key}`;
  const element = h(
    "div",
    { class: "page" },
    h("p", { class: "crumbs" }, h("a", { href: link(...wordsOf(place)) }, nameOf(place)), set !== null && ` / ${set}`),
    h("div", { class: "bar" }, h("h1", {}, title), pagerOf(to(groups[at - 1]), to(groups[at + 1]), "group")),
    verdict(group, place),
    groupFacts(group, place, key),
    promptBox(group),
    h(
      "div",
      { class: "bar tools" },
      group.samples.length > 1 &&
        choice<Order>("Order", [["index", "number"], ["reward", "reward"]], order, (value) => change("order", value)),
      group.samples.length > 1 && referencePicker(group, reference, (value) => change("with", value)),
    ),
    cards(samples, reference, place, domain),
  );
  const [previous, next] = [to(groups[at - 1]), to(groups[at + 1])];
  return { title: `${nameOf(place)}, group ${key}`, element, previous, next, parent: link(...wordsOf(place)), ...sideOf(place) };
}

/** Says why a group was not trained, with the numbers that led to it. */
function verdict(group: Group, place: Place): HTMLElement | false {
  const reason = reasonOf(group);
  if (!reason) return false;
  const isTrained = place.kind === "step" && reason.kind === "failed";
  const { mean, deviation, count: scored } = spread(group.samples.map((sample) => sample.reward));
  const failures = group.samples.filter((sample) => sample.failure).length;
  const rewards = scored ? ` Mean reward ${number(mean)}, spread ${number(deviation)}.` : "";
  const text =
    reason.kind === "filtered"
      ? `A filter dropped this group: ${reason.reason || "it gave no reason"}.${rewards}`
      : `${failures} of ${count(group.samples.length, "sample")} failed: ${reason.reason}.${isTrained ? " Failed samples are not trained." : rewards}`;
  return h("p", { class: `verdict ${reason.kind === "failed" ? "bad" : "warn"}` }, place.kind === "untrained" && h("b", {}, "Not trained. "), text);
}

function groupFacts(group: Group, place: Place, key: string): HTMLElement {
  const { mean, deviation } = spread(group.samples.map((sample) => sample.reward));
  const versions = [...new Set(group.samples.flatMap((sample) => sample.ranges.map(([version]) => version)))].sort((a, b) => a - b);
  return h(
    "p",
    { class: "summary" },
    h("span", {}, count(group.samples.length, "sample")),
    fact("mean reward", number(mean)),
    fact("spread", number(deviation)),
    versions.length > 0 && fact(versions.length > 1 ? "policy versions" : "policy version", versionRange(versions)),
    fact("id", group.id),
    place.kind === "step" && h("a", { href: link("prompt-of", place.step, key) }, "This prompt over all steps"),
  );
}

function versionRange(versions: number[]): string {
  return versions.length > 2 ? `${versions[0]} to ${versions.at(-1)}` : versions.join(", ");
}

export function promptBox(group: Group): HTMLElement {
  const isLong = group.prompt.length > 600;
  return h(
    "section",
    { class: "prompt-box", "aria-label": "Prompt" },
    folded(
      [h("b", {}, "Prompt "), isLong && label(`${firstLine(group.prompt, 80)} `), label(count(group.prompt.length, "character"))],
      !isLong,
      () => longText(group.prompt),
    ),
    group.label !== null && h("p", { class: "label-line" }, h("b", {}, "Label "), h("bdi", { class: "mono" }, group.label.slice(0, CHARACTERS_AT_ONCE))),
  );
}

/** Text of a model. Very long ones are shown in parts. */
export function longText(text: string, reference: string | null = null): HTMLElement {
  const box = h("div", { class: "text" });
  const show = (length: number): void => {
    const shown = text.slice(0, length);
    box.replaceChildren();
    if (reference === null || !shown) box.append(shown || label("(empty)"));
    else
      for (const { text, kind } of compare(shown, reference.slice(0, length)))
        box.append(kind === "new" ? h("ins", {}, text) : kind === "start" ? h("span", { class: "shared" }, text) : text);
    if (text.length > length)
      box.append(h("button", { class: "more", click: () => show(text.length) }, `Show all ${number(text.length)} characters`));
  };
  show(CHARACTERS_AT_ONCE);
  return box;
}

function referenceOf(group: Group, chosen: string | null): Sample | null {
  if (chosen === "none" || group.samples.length < 2) return null;
  const named = group.samples.find((sample) => String(sample.index) === chosen);
  if (named) return named;
  return group.samples.reduce((best, sample) => ((sample.reward ?? -Infinity) > (best.reward ?? -Infinity) ? sample : best));
}

function referencePicker(group: Group, reference: Sample | null, pick: (value: string) => void): HTMLElement {
  const select = h(
    "select",
    { name: "with", change: () => pick(select.value) },
    h("option", { value: "none", selected: reference === null }, "nothing"),
    group.samples.map((sample) =>
      h("option", { value: sample.index, selected: sample === reference }, `#${sample.index} (${number(sample.reward)})`),
    ),
  );
  return h("label", { class: "inline" }, "Mark what differs from ", select);
}

function cards(samples: Sample[], reference: Sample | null, place: Place, domain: Domain): HTMLElement {
  const firstWith = new Map<string, number>();
  for (const sample of samples.toSorted((a, b) => a.index - b.index))
    if (!firstWith.has(sample.response)) firstWith.set(sample.response, sample.index);
  const row = h("div", { class: "cards", role: "region", "aria-label": "Samples", tabindex: 0 });
  const add = (from: number): void => {
    for (const sample of samples.slice(from, from + CARDS_AT_ONCE))
      row.append(card(sample, reference === sample ? null : reference, place, domain, firstWith.get(sample.response)!, sample === reference));
    const left = samples.length - from - CARDS_AT_ONCE;
    if (left > 0) row.append(moreButton(left, CARDS_AT_ONCE, "samples", () => add(from + CARDS_AT_ONCE)));
  };
  add(0);
  return row;
}

function card(sample: Sample, reference: Sample | null, place: Place, domain: Domain, same: number, isReference: boolean): HTMLElement {
  const href = link(...wordsOf(place), "sample", sample.id);
  return h(
    "article",
    { class: `card ${isReference ? "reference" : ""}`, "aria-label": `Sample ${sample.index}` },
    h(
      "header",
      {},
      h("a", { href, class: "id", "aria-label": `Sample ${sample.index}, with tokens and all facts` }, `#${sample.index}`),
      rewardChip(sample.reward, domain),
      badges(sample),
      same !== sample.index && badge(`same text as #${same}`),
      isReference && badge("compared with"),
      h("a", { href, class: "open", tabindex: -1, "aria-hidden": "true" }, sample.has_tokens ? "tokens ›" : "open ›"),
    ),
    h("dl", { class: "numbers" }, numbersOf(sample).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))),
    sample.failure && h("p", { class: "verdict bad" }, h("b", {}, `${sample.failure[0]}. `), h("bdi", {}, sample.failure[1])),
    responseBox(sample, reference),
    folded("Facts", false, () => factsOf(sample), "quiet"),
  );
}

export function badges(sample: Sample): HTMLElement[] {
  const found: HTMLElement[] = [];
  if (sample.failure) found.push(badge("failed", "bad"));
  else if (sample.status !== "completed") found.push(badge(sample.status, "warn"));
  if (sample.dropped !== null) found.push(badge("dropped", "warn"));
  return found;
}

export function numbersOf(sample: Sample): [string, string][] {
  return [
    ["advantage", number(sample.advantage)],
    ["gap", number(sample.gap)],
    ["tokens", number(sample.response_tokens)],
    ...Object.entries(sample.parts).map(([name, value]): [string, string] => [name, number(value)]),
  ];
}

/** All that is known of a sample beside its texts. */
export function factsOf(sample: Sample): HTMLElement {
  const facts: [string, string | null][] = [
    ["id", sample.id],
    ["status", sample.status],
    ["scorer", sample.scorer],
    ["scorer version", sample.scorer_version],
    ["tokens", `${number(sample.prompt_tokens)} prompt, ${number(sample.response_tokens)} response, ${number(sample.trained_tokens)} trained`],
    ["policy versions", sample.ranges.map(([version, start, end]) => `${version} (tokens ${start} to ${end - 1})`).join(", ") || null],
    ["dropped", sample.dropped],
    ...Object.entries(sample.metadata ?? {}).map(([name, value]): [string, string] => [name, typeof value === "string" ? value : JSON.stringify(value)]),
  ];
  return h(
    "dl",
    { class: "facts" },
    facts.filter(([, value]) => value !== null).map(([name, value]) => [h("dt", {}, name), h("dd", {}, value!.slice(0, CHARACTERS_AT_ONCE))]),
  );
}

/** The response, or its turns: tool results are folded, and of a long conversation all but the last turn. */
export function responseBox(sample: Sample, reference: Sample | null = null): HTMLElement {
  if (!sample.turns.length) return longText(sample.response, reference && !reference.turns.length ? reference.response : null);
  const last = sample.turns.findLastIndex((turn) => turn.role === "assistant");
  const isLong = sample.turns.length > TURNS_OPEN_AT_ONCE;
  const box = h("div", { class: "turns" });
  append(box, [
    h("div", { class: "fold-all" }, label(count(sample.turns.length, "turn")), foldButton(box)),
    sample.turns.map((turn, index) => {
      const other = reference?.turns[index];
      const isOpen = turn.role === "assistant" && (!isLong || index === last);
      const summary = [
        h("span", { class: `role ${["assistant", "tool", "user", "system"].includes(turn.role) ? turn.role : ""}` }, turn.role),
        h("bdi", { class: "preview" }, firstLine(turn.content, 80)),
        h("span", { class: "size" }, number(turn.content.length)),
      ];
      return folded(summary, isOpen, () => longText(turn.content, other?.role === turn.role ? other.content : null), "turn");
    }),
  ]);
  return box;
}

function foldButton(box: HTMLElement): HTMLElement {
  const button = h(
    "button",
    {
      class: "plain",
      click: () => {
        const turns = [...box.querySelectorAll("details")];
        const isOpening = turns.some((turn) => !turn.open);
        for (const turn of turns) turn.open = isOpening;
        button.textContent = isOpening ? "Fold all" : "Unfold all";
      },
    },
    "Unfold all",
  );
  return button;
}
