// A group: the samples of one prompt side by side.
import { fileOf, type Group, type Sample } from "./data";
import { append, choice, factList, folded, h, label, select, shownInParts } from "./dom";
import { badge, count, type Domain, fact, firstLine, link, number, rewardChip, rewardDomain, rewardsOf, spread } from "./format";
import { changed, groupsOf, linkOf, nameOf, type Place, placeOf, reasonOf, sideOf } from "./groups";
import { load } from "./load";
import { type Context, neighbours, page, type Route, type View } from "./view";

const CARDS_AT_ONCE = 24;
const CHARACTERS_AT_ONCE = 4_000;
const TURNS_OPEN_AT_ONCE = 6;

export async function groupView({ words, query }: Route, context: Context): Promise<View> {
  const place = placeOf(words);
  const key = words.at(-1)!;
  const groups = await groupsOf(place, context.overview);
  const at = groups.findIndex((each) => each.key === key);
  if (at < 0) throw new Error(`${nameOf(place)} has no group ${key}. It has ${count(groups.length, "group")}.`);
  const { group } = groups[at]!;
  const order = query.get("order") ?? "index";
  const samples = order === "reward" ? group.samples.toSorted((a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity)) : group.samples;
  const reference = referenceOf(group, query.get("with"));
  const references = group.samples.map(({ index, reward }): [string, string] => [String(index), `#${index} (${number(reward)})`]);
  const change = (name: string, value: string): void => context.go(changed(linkOf(place, "group", key), query, name, value), true);
  const view = page(
    {
      title: `Group ${key}`,
      above: [[linkOf(place), nameOf(place)]],
      beside: group.set !== null && badge(group.set),
      noun: "group",
      ...neighbours(groups, at, (each) => linkOf(place, "group", each.key)),
    },
    verdict(group, place),
    groupFacts(group, place, key),
    promptBox(group),
    group.samples.length > 1 &&
      h(
        "div.bar.tools",
        choice("Order", [["index", "number"], ["reward", "reward"]], order, (value) => change("order", value)),
        select("Mark what differs from", [["none", "nothing"], ...references], String(reference?.index ?? "none"), (value) => change("with", value)),
      ),
    cards(samples, reference, place, rewardDomain(groups.flatMap(({ group }) => rewardsOf(group)))),
  );
  const shown = (): void => {
    if (place.step === null || !group.samples.some((sample) => sample.has_tokens)) return;
    void load(fileOf("tokens", place.step)).catch(() => null); // probably asked for next
  };
  return { ...view, shown, ...sideOf(place) };
}

/** Says why a group was not trained, with the numbers that led to it. */
function verdict(group: Group, place: Place): HTMLElement | false {
  const reason = reasonOf(group);
  if (!reason) return false;
  const isTrained = place.kind === "step" && reason.kind === "failed";
  const { mean, deviation, count: scored } = spread(rewardsOf(group));
  const failures = group.samples.filter((sample) => sample.failure).length;
  const rewards = scored ? ` Mean reward ${number(mean)}, spread ${number(deviation)}.` : "";
  const text =
    reason.kind === "filtered"
      ? `A filter dropped this group: ${reason.reason || "it gave no reason"}.${rewards}`
      : `${failures} of ${count(group.samples.length, "sample")} failed: ${reason.reason}.${isTrained ? " Failed samples are not trained." : rewards}`;
  return h("p", { class: `verdict ${reason.kind === "failed" ? "bad" : "warn"}` }, place.kind === "untrained" && h("b", "Not trained. "), text);
}

function groupFacts(group: Group, place: Place, key: string): HTMLElement {
  const { mean, deviation } = spread(rewardsOf(group));
  const versions = group.samples.flatMap((sample) => sample.ranges.map(([version]) => version));
  const { low, high } = spread(versions);
  return h(
    "p.summary",
    h("span", count(group.samples.length, "sample")),
    fact("mean reward", number(mean)),
    fact("spread", number(deviation)),
    versions.length > 0 && (low < high ? fact("policy versions", `${low} to ${high}`) : fact("policy version", String(low))),
    fact("id", group.id),
    place.kind === "step" && h("a", { href: link("prompt-of", String(place.step), key) }, "This prompt over all steps"),
  );
}

export function promptBox(group: Group): HTMLElement {
  const isLong = group.prompt.length > 600;
  return h(
    "section.prompt-box",
    { "aria-label": "Prompt" },
    folded(
      [h("b", "Prompt "), isLong && label(`${firstLine(group.prompt, 80)} `), label(count(group.prompt.length, "character"))],
      !isLong,
      () => longText(group.prompt),
    ),
    group.label !== null && h("p.label-line", h("b", "Label "), h("bdi.mono", group.label.slice(0, CHARACTERS_AT_ONCE))),
  );
}

const WORDS = /\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu;

/** What a text begins with as another one does, what is its own, and what both end with. Cut between words. */
function divided(text: string, other: string): [start: string, own: string, end: string] {
  const [a, b] = [other.match(WORDS) ?? [], text.match(WORDS) ?? []];
  const most = Math.min(a.length, b.length);
  let [start, end] = [0, 0];
  while (start < most && a[start] === b[start]) start += 1;
  while (end < most - start && a.at(-1 - end) === b.at(-1 - end)) end += 1;
  const last = b.length - end;
  return [b.slice(0, start).join(""), b.slice(start, last).join(""), b.slice(last).join("")];
}

/** Text of a model. Very long ones are shown in parts. */
export function longText(text: string, reference: string | null = null): HTMLElement {
  const box = h("div.text");
  const show = (length: number): void => {
    const shown = text.slice(0, length);
    box.replaceChildren();
    if (reference === null || !text) append(box, [text ? shown : label("(empty)")]);
    else {
      const [start, own, end] = divided(shown, reference.slice(0, length));
      append(box, [h("span.shared", start), own && h("ins", own), h("span.shared", end)]);
    }
    if (text.length > length)
      box.append(h("button.more", { click: () => show(text.length) }, `Show all ${number(text.length)} characters`));
  };
  show(CHARACTERS_AT_ONCE);
  return box;
}

function referenceOf(group: Group, chosen: string | null): Sample | null {
  if (chosen === "none" || group.samples.length < 2) return null;
  const named = group.samples.find((sample) => String(sample.index) === chosen);
  return named ?? group.samples.reduce((best, sample) => ((sample.reward ?? -Infinity) > (best.reward ?? -Infinity) ? sample : best));
}

/** What the policy wrote, of all its turns. */
export function writtenBy(sample: Sample): string {
  const own = sample.turns.filter((turn) => turn.role === "assistant").map((turn) => turn.content);
  return own.length ? own.join("\n") : sample.response;
}

function cards(samples: Sample[], reference: Sample | null, place: Place, domain: Domain): HTMLElement {
  const firstWith = new Map<string, number>();
  for (const sample of samples.toSorted((a, b) => b.index - a.index)) firstWith.set(writtenBy(sample), sample.index);
  const row = h("div.cards", { role: "region", "aria-label": "Samples", tabindex: 0 });
  shownInParts(row, samples.length, CARDS_AT_ONCE, "samples", (from, to) =>
    row.append(...samples.slice(from, to).map((sample) => card(sample, reference, place, domain, firstWith.get(writtenBy(sample))!))),
  );
  return row;
}

function card(sample: Sample, reference: Sample | null, place: Place, domain: Domain, same: number): HTMLElement {
  const href = linkOf(place, "sample", sample.id);
  const isReference = sample === reference;
  return h(
    "article.card",
    { class: isReference && "reference", "aria-label": `Sample ${sample.index}` },
    h(
      "header",
      h("a.id", { href, "aria-label": `Sample ${sample.index}, with tokens and all facts` }, `#${sample.index}`),
      rewardChip(sample.reward, domain),
      badges(sample),
      same !== sample.index && badge(`same text as #${same}`),
      isReference && badge("compared with"),
      h("a.open", { href, tabindex: -1, "aria-hidden": "true" }, sample.has_tokens ? "tokens ›" : "open ›"),
    ),
    factList(numbersOf(sample), "numbers"),
    failureOf(sample),
    responseBox(sample, isReference ? null : reference),
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

export function failureOf({ failure }: Sample): HTMLElement | null {
  return failure && h("p.verdict.bad", h("b", `${failure[0]}. `), h("bdi", failure[1]));
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
  return factList(facts.flatMap(([name, value]) => (value === null ? [] : [[name, value.slice(0, CHARACTERS_AT_ONCE)] as const])));
}

/** The response, or its turns: tool results are folded, and of a long conversation all but the last turn. */
export function responseBox(sample: Sample, reference: Sample | null = null): HTMLElement {
  const { turns } = sample;
  if (!turns.length) return longText(sample.response, reference && !reference.turns.length ? reference.response : null);
  const last = turns.findLastIndex((turn) => turn.role === "assistant");
  const boxes = turns.map(({ role, content }, index) => {
    const other = reference?.turns[index];
    const isOpen = role === "assistant" && (turns.length <= TURNS_OPEN_AT_ONCE || index === last);
    const preview = h("bdi.preview", firstLine(content, 80));
    const summary = [h("span.role", { class: ROLES.has(role) && role }, role), preview, h("span.size", number(content.length))];
    return folded(summary, isOpen, () => longText(content, other?.role === role ? other.content : null), "turn");
  });
  const fold = h("button.plain", { click: () => foldAll(boxes, fold) }, "Unfold all");
  return h("div.turns", h("div.fold-all", label(count(turns.length, "turn")), fold), boxes);
}

const ROLES = new Set(["assistant", "tool", "user", "system"]);

function foldAll(turns: HTMLDetailsElement[], button: HTMLElement): void {
  const isOpening = turns.some((turn) => !turn.open);
  for (const turn of turns) turn.open = isOpening;
  button.textContent = isOpening ? "Fold all" : "Unfold all";
}
