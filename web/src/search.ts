// Search: over prompts at once, and over ids, labels and texts of the steps that are in memory, or of all.
import type { Overview, Prompts } from "./data";
import { h, VirtualList } from "./dom";
import { badge, count, link, number } from "./format";
import { groupsOf, linkOf, loadedGroups, nameOf, type Place, type PlacedGroup } from "./groups";
import { load } from "./load";
import { type Context, page, type Route, type View } from "./view";

interface Hit {
  href: string;
  where: string;
  text: string;
  at: number; // of the match in the text
}

const MOST_HITS = 2_000;
const AROUND = 60; // characters before a match
const FILES_AT_ONCE = 10; // between two drawings of the list
const SEARCH_ALL = "Search all steps";

export async function searchView({ query }: Route, context: Context): Promise<View> {
  const prompts = await load<Prompts>("prompts");
  const lower = prompts.texts.map((text) => text.toLowerCase());
  let wanted = query.get("q") ?? "";
  let running = 0; // number of the search that may go on
  const list = new VirtualList<Hit>(context.content, (hit) => hitRow(hit, wanted.length), "Results", "hits");
  const status = h("p.summary", { role: "status" });
  const progress = h("progress", { max: 1, value: 0, "aria-label": "Steps searched", hidden: true });
  const button = h("button.button", { click: () => (progress.hidden ? void searchAll() : stop()) }, SEARCH_ALL);

  const show = (hits: Hit[], where: string): void => {
    list.show(hits);
    status.textContent = `${hits.length >= MOST_HITS ? `The first ${number(MOST_HITS)} results` : count(hits.length, "result")} in ${where}.`;
  };
  const stop = (): void => {
    running += 1;
    progress.hidden = true;
    button.textContent = SEARCH_ALL;
  };
  const inPrompts = (text: string): Hit[] => {
    const hits: Hit[] = [];
    for (const [index, each] of lower.entries()) {
      const at = each.indexOf(text);
      if (at >= 0) hits.push({ href: link("prompt", index), where: `prompt ${index}`, text: prompts.texts[index]!, at });
      if (hits.length >= MOST_HITS / 2) break;
    }
    return hits;
  };
  const searchLoaded = (): void => {
    stop();
    const text = wanted.toLowerCase();
    button.hidden = !text;
    const loaded = placesOf(context.overview).map((place) => [place, loadedGroups(place)] as const).filter(([, groups]) => groups.length);
    const hits = text ? [...inPrompts(text), ...loaded.flatMap(([place, groups]) => inGroups(text, place, groups))] : [];
    show(hits.slice(0, MOST_HITS), `prompts and ${count(loaded.length, "loaded file")}`);
    if (!text) status.textContent = "Type to search prompts, ids, labels and texts.";
  };
  const searchAll = async (): Promise<void> => {
    const text = wanted.toLowerCase();
    const places = placesOf(context.overview);
    const mine = ++running;
    progress.hidden = false;
    button.textContent = "Stop";
    const hits = inPrompts(text);
    let done = 0;
    for (const place of places) {
      const groups = await groupsOf(place, context.overview).catch(() => []); // a missing file has no hits: its own page says so
      if (mine !== running || !list.element.isConnected) return;
      hits.push(...inGroups(text, place, groups).slice(0, MOST_HITS - hits.length));
      progress.value = ++done / places.length;
      if (hits.length >= MOST_HITS) break;
      if (done % FILES_AT_ONCE === 0) show(hits, `${number(done)} of ${count(places.length, "file")}`);
    }
    stop();
    show(hits, done === places.length ? "all steps" : `${number(done)} of ${count(places.length, "file")}`);
  };
  const input = h("input", {
    type: "search",
    id: "query",
    value: wanted,
    placeholder: "prompt, id, label or text",
    "aria-label": "Search",
    input: () => {
      wanted = input.value;
      history.replaceState(null, "", `#/search?q=${encodeURIComponent(wanted)}`);
      searchLoaded();
    },
  });
  const shown = (): void => {
    searchLoaded();
    input.focus();
  };
  return { ...page({ title: "Search" }, h("div.bar.search", input, button, progress), status, list.element), shown };
}

function placesOf({ untrained, steps, evals }: Overview): Place[] {
  return [
    ...(untrained.failed + untrained.filtered > 0 ? [{ kind: "untrained", step: null } as const] : []),
    ...steps.step.map((step) => ({ kind: "step", step }) as const),
    ...evals.map((step) => ({ kind: "evaluation", step }) as const),
  ];
}

function inGroups(text: string, place: Place, groups: PlacedGroup[]): Hit[] {
  const hits: Hit[] = [];
  const find = (texts: string[], href: string, where: string): boolean => {
    for (const each of texts) {
      const at = each.toLowerCase().indexOf(text);
      if (at >= 0) return hits.push({ href, where, text: each, at }) > 0;
    }
    return false;
  };
  for (const { group, key } of groups) {
    const where = place.kind === "untrained" ? "Untrained" : `${nameOf(place)}, group ${key}`;
    const texts = [group.id, group.label ?? "", ...(place.kind === "step" ? [] : [group.prompt])]; // prompts of steps are searched before
    if (find(texts, linkOf(place, "group", key), where)) continue;
    for (const sample of group.samples) {
      const said = sample.turns.length ? sample.turns.map((turn) => turn.content) : [sample.response];
      find([sample.id, ...said], linkOf(place, "sample", sample.id), `${where}, #${sample.index}`);
    }
  }
  return hits;
}

function hitRow({ href, where, text, at }: Hit, length: number): HTMLElement {
  const [start, end] = [Math.max(0, at - AROUND), at + length];
  const parts = [start > 0 && "… ", text.slice(start, at), h("mark", text.slice(at, end)), text.slice(end, end + 200)];
  return h("a.row.hits", { href }, h("span.where", badge(where)), h("bdi.prompt", parts));
}
