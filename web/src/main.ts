// The frame: where we are, keys, themes, and what goes on while the run does.

import { conversation, groupsView, groupView, bounds, summary, type Collection } from "./groups";
import { sparkline } from "./charts";
import { count, h, text, virtualList } from "./dom";
import { forgetGrowing, loadEvaluation, loadOverview, loadStep, loadTokens, loadUntrained, type Overview } from "./data";
import { promptsView, promptView, searchView } from "./find";
import { ledgerView, runView } from "./run";
import { pressMode, tokensView, withoutTokens } from "./tokens";

const REFRESH = 5000;

let overview: Overview;
let shown = 0; // numbers the views, so that a slow one does not replace a later one
const main = h("main", { id: "main", tabindex: "0" });
const side = h("aside", { class: "steps", "aria-label": "Steps" });
const frame = h("div", { class: "frame" });
const header = h("header", { class: "bar" });
const search = h("input", { id: "search", type: "search", placeholder: "Search prompts and responses", "aria-label": "Search prompts and responses" });

const parts = () => location.hash.replace(/^#\/?/, "").split("/").map(decodeURIComponent);
const at = (value: string | undefined) => Number(value ?? NaN);

async function collection(kind: string, step: number): Promise<Collection> {
  if (kind === "untrained") return { title: "Not trained", base: "#/untrained", up: "#/ledger", groups: (await loadUntrained()).groups, step: null };
  if (kind === "evaluation") {
    const groups = (await loadEvaluation(step)).sets.flatMap((set) => set.groups);
    return { title: `Evaluation after step ${step}`, base: `#/evaluation/${step}`, up: "#/evaluations", groups, step };
  }
  return { title: `Step ${step}`, base: `#/step/${step}`, up: "#/steps", groups: (await loadStep(step)).groups, step };
}

async function view(words: string[]): Promise<HTMLElement> {
  const [kind, first, second, third] = words;
  if (kind === "" || kind === "run") return runView(overview);
  if (kind === "ledger") return ledgerView(overview);
  if (kind === "prompts") return promptsView();
  if (kind === "prompt") return promptView(at(first));
  if (kind === "search") return searchView(first ?? "", overview);
  if (kind === "steps") return first_(overview.steps.step, "#/step/", "No step was trained yet.");
  if (kind === "evaluations") return first_(overview.evals, "#/evaluation/", "There was no evaluation yet.");
  const isUntrained = kind === "untrained";
  if (isUntrained || kind === "step" || kind === "evaluation") {
    const [what, which] = isUntrained ? [first, second] : [second, third];
    const found = await collection(kind, at(first));
    if (what === "group") return groupView(found, at(which));
    if (what === "sample") return sampleView(found, which ?? "");
    return groupsView(found);
  }
  return h("div", { class: "page" }, h("h1", {}, "No such view"), h("p", {}, h("a", { href: "#/" }, "The run")));
}

/** The newest step or evaluation. */
function first_(steps: number[], base: string, none: string): HTMLElement {
  if (steps.length) location.replace(`${base}${steps.at(-1)}`);
  return h("div", { class: "page" }, h("p", {}, none));
}

async function sampleView(found: Collection, id: string): Promise<HTMLElement> {
  const index = found.groups.findIndex((group) => group.samples.some((sample) => sample.id === id));
  const sample = found.groups[index]?.samples.find((each) => each.id === id);
  if (!sample) return h("div", { class: "page" }, h("h1", {}, "No such sample"), h("p", { class: "mono" }, id));
  const [low, high] = bounds(found.groups);
  const body = sample.has_tokens && found.step !== null ? tokensView(await loadTokens(found.step), sample) : withoutTokens(sample);
  return h(
    "div",
    { class: "page" },
    h("h1", {}, h("a", { href: found.base }, found.title), " · ", h("a", { href: `${found.base}/group/${index}` }, `group ${index}`), ` · sample ${sample.index}`),
    h("p", { class: "mono quiet" }, sample.id),
    h("div", { class: "sample one" }, summary(sample, low, high)),
    body,
    sample.turns.length > 1 ? h("section", {}, h("h2", {}, "Turns"), conversation(sample)) : null,
    h("details", { class: "asked" }, h("summary", {}, "Prompt"), text(found.groups[index].prompt)),
    sample.metadata ? h("details", { class: "asked" }, h("summary", {}, "Metadata"), text(JSON.stringify(sample.metadata, null, 2))) : null,
  );
}

async function show(): Promise<void> {
  const mine = ++shown;
  const words = parts();
  const slow = setTimeout(() => mine === shown && main.replaceChildren(h("p", { class: "quiet page" }, "loading …")), 150);
  let found: HTMLElement;
  try {
    found = await view(words);
  } catch (error) {
    found = h("div", { class: "page" }, h("h1", {}, "This cannot be shown"), h("p", {}, error instanceof Error ? error.message : String(error)));
  }
  clearTimeout(slow);
  if (mine !== shown) return;
  main.replaceChildren(found);
  main.scrollTop = 0;
  document.title = `${found.querySelector("h1")?.textContent ?? "headrace"} · ${overview.run}`;
  const tab = { step: "steps", evaluation: "evaluations", prompt: "prompts", run: "" }[words[0]] ?? words[0];
  for (const link of header.querySelectorAll("nav a")) {
    if (link.getAttribute("href") === `#/${tab}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  drawSide(words);
}

function drawSide(words: string[]): void {
  const isStep = words[0] === "step";
  const steps = isStep ? overview.steps.step : words[0] === "evaluation" ? overview.evals : [];
  frame.classList.toggle("with-side", steps.length > 0);
  if (!steps.length) return side.replaceChildren();
  const base = isStep ? "#/step/" : "#/evaluation/";
  const current = at(words[1]);
  const rewards = overview.metrics.columns["reward/mean"] ?? [];
  const rewardOf = new Map(overview.metrics.step.map((step, index) => [step, rewards[index]]));
  const list = virtualList(isStep ? "Steps" : "Evaluations", steps.length, 32, (index) => {
    const step = steps[steps.length - 1 - index];
    const mean = isStep ? rewardOf.get(step) : null;
    const hasTokens = isStep && overview.steps.tokens[steps.length - 1 - index] > 0;
    const link = h("a", { class: "step-row", href: `${base}${step}` }, h("span", {}, `${isStep ? "step" : "after"} ${step}`), h("span", { class: "quiet", title: hasTokens ? "with tokens" : null }, hasTokens ? "tokens" : ""), h("span", { class: "num" }, mean === null || mean === undefined ? "" : mean.toFixed(3)));
    if (step === current) link.setAttribute("aria-current", "true");
    return link;
  });
  side.replaceChildren(isStep ? sparkline(rewards) : "", list.element);
  list.show(steps.length - 1 - steps.indexOf(current));
}

function drawHeader(): void {
  const { state } = overview;
  const links: [string, string][] = [["", "Run"], ["steps", "Steps"], ["evaluations", "Evaluations"], ["prompts", "Prompts"], ["ledger", "Ledger"]];
  if (overview.untrained.failed + overview.untrained.filtered) links.splice(4, 0, ["untrained", "Not trained"]);
  const nav = h("nav", { "aria-label": "Views" }, ...links.map(([path, name]) => h("a", { href: `#/${path}` }, name)));
  const theme = h("button", { title: "key t", onclick: switchTheme }, "theme");
  const help = h("button", { title: "key ?", onclick: showHelp, "aria-label": "Keys" }, "?");
  const form = h("form", { role: "search", onsubmit: submit }, search);
  header.replaceChildren(h("span", { class: "run" }, h("b", {}, overview.run), h("span", { class: `phase ${state.phase}` }, state.phase), h("span", { class: "quiet" }, `step ${state.step ?? 0} of ${count(state.num_rollout)}`)), nav, form, theme, help);
}

function submit(event: Event): void {
  event.preventDefault();
  if (search.value.trim()) location.hash = `#/search/${encodeURIComponent(search.value.trim())}`;
}

const THEME = "headrace-theme";

function switchTheme(): void {
  const isDark = document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = isDark ? "light" : "dark";
  try {
    localStorage.setItem(THEME, document.documentElement.dataset.theme);
  } catch {
    // a page that was opened as a file may keep nothing
  }
}

function startTheme(): void {
  try {
    const theme = localStorage.getItem(THEME);
    if (theme) document.documentElement.dataset.theme = theme;
  } catch {
    // as above
  }
}

const KEYS: [string, string][] = [["j  k", "next, previous group"], ["]  [", "next, previous step"], ["1 … 5", "colour tokens by mask, version, log-prob, advantage, gap"], ["← → ↑ ↓", "move over tokens"], ["/", "search"], ["t", "dark or light"], ["Esc", "up"], ["?", "this list"]];

function showHelp(): void {
  const dialog = h("dialog", { id: "help", "aria-label": "Keys", onclose: () => dialog.remove() }, h("h2", {}, "Keys"), h("dl", { class: "facts" }, ...KEYS.flatMap(([key, what]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, what)])), h("form", { method: "dialog" }, h("button", {}, "close")));
  document.body.append(dialog);
  dialog.showModal();
}

function key(event: KeyboardEvent): void {
  const target = event.target as HTMLElement;
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (["INPUT", "SELECT", "TEXTAREA"].includes(target.tagName)) {
    if (event.key === "Escape") target.blur();
    return;
  }
  if (document.querySelector("dialog")) return;
  const act: Record<string, () => void> = {
    "?": showHelp,
    "/": () => search.focus(),
    t: switchTheme,
    j: () => moveGroup(1),
    k: () => moveGroup(-1),
    "]": () => moveStep(1),
    "[": () => moveStep(-1),
    Escape: up,
  };
  if (event.key in act) act[event.key]();
  else if (event.key >= "1" && event.key <= "5") pressMode(Number(event.key) - 1);
  else return;
  event.preventDefault();
}

function moveGroup(by: number): void {
  const words = parts();
  const place = words.indexOf("group");
  if (place > 0) document.querySelector<HTMLAnchorElement>(by > 0 ? ".next" : ".previous")?.click();
  else {
    const rows = [...document.querySelectorAll<HTMLElement>("main .group-row")];
    const now = rows.indexOf(document.activeElement as HTMLElement);
    rows[now < 0 ? 0 : Math.max(0, Math.min(rows.length - 1, now + by))]?.focus();
  }
}

function moveStep(by: number): void {
  const [kind, step] = parts();
  const steps = kind === "evaluation" ? overview.evals : overview.steps.step;
  const index = kind === "step" || kind === "evaluation" ? steps.indexOf(Number(step)) + by : steps.length - 1;
  if (steps[index] !== undefined) location.hash = `#/${kind === "evaluation" ? kind : "step"}/${steps[index]}`;
}

function up(): void {
  const words = parts();
  const depth = words[0] === "untrained" ? 1 : 2;
  location.hash = words.length > depth ? `#/${words.slice(0, depth).map(encodeURIComponent).join("/")}` : "#/";
}

async function refresh(): Promise<void> {
  if (!overview.live) return;
  try {
    const newer = await loadOverview();
    const isNewer = newer.state.step !== overview.state.step || newer.live !== overview.live || newer.evals.length !== overview.evals.length;
    overview = newer;
    if (isNewer) forgetGrowing();
    if (isNewer) drawHeader();
    const words = parts();
    if (["", "run", "ledger"].includes(words[0])) {
      const top = main.scrollTop;
      await show();
      main.scrollTop = top;
    } else if (isNewer) drawSide(words);
  } catch {
    overview.live = false; // headrace view has ended: what is here stays
  }
}

async function start(): Promise<void> {
  startTheme();
  frame.append(side, main);
  document.body.append(h("a", { class: "skip", href: "#main", onclick: (event: Event) => (event.preventDefault(), main.focus()) }, "to the content"), header, frame);
  try {
    overview = await loadOverview();
  } catch (error) {
    main.append(h("div", { class: "page" }, h("h1", {}, "headrace"), h("p", {}, String(error instanceof Error ? error.message : error))));
    return;
  }
  drawHeader();
  addEventListener("hashchange", () => void show());
  addEventListener("keydown", key);
  await show();
  setInterval(() => void refresh(), REFRESH);
}

void start();
