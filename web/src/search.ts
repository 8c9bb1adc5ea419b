// Search: over prompts at once, and over ids, labels and texts of the steps that are in memory, or of all.
import type { Prompts } from "./data";
import { h, VirtualList } from "./dom";
import { badge, count, link, number } from "./format";
import { groupsOf, loadedGroups, type Place, type PlacedGroup, wordsOf } from "./groups";
import { load, loadedNames } from "./load";
import type { Context, Route, View } from "./view";

interface Hit {
  href: string;
  where: string;
  text: string;
  at: number; // of the match in the text
}

const MOST_HITS = 2_000;
const AROUND = 60; // characters before a match
let promptTexts: { of: Prompts; lower: string[] } | null = null;

function lowerTexts(prompts: Prompts): string[] {
  if (promptTexts?.of !== prompts) promptTexts = { of: prompts, lower: prompts.texts.map((text) => text.toLowerCase()) };
  return promptTexts.lower;
}

export async function searchView({ query }: Route, context: Context): Promise<View> {
  const prompts = await load<Prompts>("prompts");
  let wanted = query.get("q") ?? "";
  let stop = false;
  const list = new VirtualList<Hit>(context.content, (hit) => hitRow(hit, wanted.length), "Results", "hits");
  const told = h("p", { class: "summary", role: "status" });
  const progress = h("progress", { max: 1, value: 0, "aria-label": "Steps searched", hidden: true });
  const everywhere = h("button", { class: "button", click: () => (isRunning ? (stop = true) : void searchAll()) }, "Search all steps");
  let isRunning = false;
  let hits: Hit[] = [];

  const tell = (text: string): void => told.replaceChildren(h("span", {}, text));
  const begin = (): void => {
    stop = true;
    const text = wanted.toLowerCase();
    hits = text ? inMemory(text, prompts) : [];
    list.show(hits);
    everywhere.hidden = !text;
    tell(text ? `${found(hits)} in prompts and ${memory()}.` : "Type to search prompts, ids, labels and texts.");
  };
  const searchAll = async (): Promise<void> => {
    const [text, { overview }] = [wanted.toLowerCase(), context];
    const places: Place[] = [
      ...(overview.untrained.failed + overview.untrained.filtered > 0 ? [{ kind: "untrained" } as Place] : []),
      ...overview.steps.step.map((step): Place => ({ kind: "step", step })),
      ...overview.evals.map((step): Place => ({ kind: "evaluation", step })),
    ];
    [stop, isRunning, progress.hidden, everywhere.textContent] = [false, true, false, "Stop"];
    hits = inPrompts(text, prompts);
    let done = 0;
    for (const place of places) {
      if (stop || hits.length >= MOST_HITS) break;
      try {
        hits.push(...inGroups(text, place, await groupsOf(place, overview)));
      } catch {
        // a file that is missing has no hits: its own page says so
      }
      progress.value = ++done / places.length;
      if (!stop && (done % 10 === 0 || done === places.length)) {
        list.show(hits);
        tell(`${found(hits)} in ${number(done)} of ${count(places.length, "file")}.`);
      }
    }
    [isRunning, progress.hidden, everywhere.textContent] = [false, true, "Search all steps"];
    if (wanted.toLowerCase() !== text) return;
    list.show(hits);
    tell(`${found(hits)} in ${done === places.length ? "all steps" : `${number(done)} of ${count(places.length, "file")}`}.`);
  };
  const input = h("input", {
    type: "search",
    id: "query",
    value: wanted,
    placeholder: "prompt, id, label or text",
    "aria-label": "Search",
    autocomplete: "off",
    spellcheck: "false",
    input: () => {
      wanted = input.value;
      history.replaceState(null, "", `#/search?q=${encodeURIComponent(wanted)}`);
      begin();
    },
  });
  const element = h(
    "div",
    { class: "page" },
    h("h1", {}, "Search"),
    h("div", { class: "bar search" }, input, everywhere, progress),
    told,
    list.element,
  );
  return {
    title: "Search",
    element,
    shown: () => {
      begin();
      input.focus();
    },
    left: () => {
      stop = true;
      list.close();
    },
  };
}

function found(hits: Hit[]): string {
  return hits.length >= MOST_HITS ? `The first ${number(MOST_HITS)} results` : count(hits.length, "result");
}

function memory(): string {
  return count(loadedNames().filter((name) => /^(step|eval)-|^untrained$/.test(name)).length, "loaded file");
}

function inMemory(text: string, prompts: Prompts): Hit[] {
  const hits = inPrompts(text, prompts);
  for (const name of loadedNames()) {
    const [, kind, step] = /^(step|eval)-(\d+)$/.exec(name) ?? [];
    const place: Place = kind === undefined ? { kind: "untrained" } : { kind: kind === "step" ? kind : "evaluation", step: Number(step) };
    if ((kind !== undefined || name === "untrained") && hits.length < MOST_HITS) hits.push(...inGroups(text, place, loadedGroups(place)));
  }
  return hits.slice(0, MOST_HITS);
}

function inPrompts(text: string, prompts: Prompts): Hit[] {
  const hits: Hit[] = [];
  lowerTexts(prompts).forEach((lower, index) => {
    if (hits.length >= MOST_HITS / 2) return;
    const at = lower.indexOf(text);
    if (at >= 0) hits.push({ href: link("prompt", index), where: `prompt ${index}`, text: prompts.texts[index]!, at });
  });
  return hits;
}

function inGroups(text: string, place: Place, groups: PlacedGroup[]): Hit[] {
  const hits: Hit[] = [];
  const name = place.kind === "untrained" ? "untrained" : `${place.kind === "step" ? "step" : "evaluation"} ${place.step}`;
  for (const { group, key } of groups) {
    const number = place.kind === "untrained" ? "" : `, group ${key}`;
    const inGroup = [group.id, group.label ?? "", ...(place.kind === "step" ? [] : [group.prompt])].find((each) => each.toLowerCase().includes(text));
    const hit = (form: "group" | "sample", id: string, where: string, found: string): number =>
      hits.push({ href: link(...wordsOf(place), form, id), where, text: found, at: found.toLowerCase().indexOf(text) });
    if (inGroup !== undefined) hit("group", key, `${name}${number}`, inGroup);
    for (const sample of group.samples) {
      const texts = [sample.id, ...(sample.turns.length ? sample.turns.map((turn) => turn.content) : [sample.response])];
      const inSample = texts.find((each) => each.toLowerCase().includes(text));
      if (inSample !== undefined && inGroup === undefined) hit("sample", sample.id, `${name}${number}, #${sample.index}`, inSample);
    }
  }
  return hits;
}

function hitRow({ href, where, text, at }: Hit, length: number): HTMLElement {
  const [start, end] = [Math.max(0, at - AROUND), at + length];
  return h(
    "a",
    { class: "row hits", href },
    h("span", { class: "where" }, badge(where)),
    h("bdi", { class: "prompt" }, start > 0 && "… ", text.slice(start, at), h("mark", {}, text.slice(at, end)), text.slice(end, end + 200)),
  );
}
