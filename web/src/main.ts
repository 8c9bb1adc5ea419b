// The frame of the page: links to views, keys, theme, and news of a live run.
import type { Overview } from "./data";
import { factList, h, label } from "./dom";
import { clock, link, number } from "./format";
import { groupView } from "./group";
import { placeView } from "./groups";
import { ledgerView } from "./ledger";
import { forget, load } from "./load";
import { promptOfView, promptsView, promptView } from "./prompt";
import { runView } from "./run";
import { searchView } from "./search";
import { Side } from "./side";
import { sampleView } from "./tokens";
import { type Context, page, type Route, type View } from "./view";

const VERSION = 1; // of the data
const POLL_MILLISECONDS = 5_000;
const SLOW_MILLISECONDS = 200; // a longer wait is shown
const THEME = "headrace-theme";

const top = document.getElementById("top")!;
const content = document.getElementById("content")!;
const status = document.getElementById("status")!;
const side = new Side(document.getElementById("side")!);

let context: Context;
let view: View | null = null;
let turn = 0; // of the last navigation: a slower earlier one is forgotten

function routeOf(hash: string): Route {
  const [path = "", query = ""] = hash.replace(/^#\/?/, "").split(/\?(.*)/s);
  return { words: path.split("/").filter(Boolean).map(decoded), query: new URLSearchParams(query) };
}

function decoded(word: string): string {
  try {
    return decodeURIComponent(word);
  } catch {
    return word;
  }
}

function viewOf(route: Route): View | Promise<View> {
  const { words } = route;
  const [kind] = words;
  const form = words.at(-2); // "sample" or "group", before its id
  if (kind === undefined || kind === "run") return runView(route, context);
  if (kind === "ledger") return ledgerView(route, context);
  if (kind === "search") return searchView(route, context);
  if (kind === "prompts") return promptsView(route, context);
  if (kind === "prompt") return promptView(route, context);
  if (kind === "prompt-of") return promptOfView(route, context);
  if (kind === "steps" || kind === "evaluations") return lastOf(kind);
  if (form === "sample") return sampleView(route, context);
  return form === "group" ? groupView(route, context) : placeView(route, context);
}

/** The newest step or evaluation; on a phone the list of all. */
function lastOf(kind: "steps" | "evaluations"): View {
  const { steps, evals } = context.overview;
  const [title, last] = kind === "steps" ? ["Steps", steps.step.at(-1)] : ["Evaluations", evals.at(-1)];
  if (last === undefined) return page({ title }, h("p.empty", "The run has recorded no samples of these yet."));
  if (!matchMedia("(max-width: 719px)").matches) context.go(link(kind === "steps" ? "step" : "evaluation", last), true);
  return { ...page({ title }), side: { kind, chosen: null } };
}

async function open(): Promise<void> {
  if (location.hash && !location.hash.startsWith("#/")) return;
  const mine = ++turn;
  const route = routeOf(location.hash);
  const slow = setTimeout(() => say("Loading …"), SLOW_MILLISECONDS);
  let next: View;
  try {
    next = await viewOf(route);
  } catch (error) {
    next = page({ title: "Not found" }, h("p.verdict.warn", (error as Error).message));
  } finally {
    clearTimeout(slow);
  }
  if (mine !== turn) return;
  say("");
  const isSame = view?.title === next.title;
  const focused = isSame ? focusedControl() : null;
  const scroll = content.scrollTop;
  view?.left?.();
  view = next;
  document.title = `${next.title} · ${context.overview.run}`;
  content.replaceChildren(next.element);
  document.body.classList.toggle("list-only", next.side?.chosen === null);
  drawTop();
  side.show(next.side, context.overview);
  next.shown?.();
  content.scrollTop = isSame ? scroll : 0;
  (focused ? document.querySelector<HTMLElement>(focused) : null)?.focus();
  if (document.activeElement === document.body) content.focus({ preventScroll: true }); // arrow keys scroll it
}

/** Where the focus is among the controls of a view that is about to be drawn again. */
function focusedControl(): string | null {
  const element = document.activeElement;
  if (element instanceof HTMLInputElement && element.type === "radio") return `input[name="${element.name}"]:checked`;
  return element instanceof HTMLSelectElement ? `select[name="${element.name}"]` : null;
}

function say(text: string): void {
  status.textContent = text;
}

function go(href: string, replace = false): void {
  if (!replace) location.hash = href;
  else {
    history.replaceState(null, "", href);
    void open();
  }
}

const TABS: [string, string, string[]][] = [
  ["run", "Run", ["run"]],
  ["steps", "Steps", ["steps", "step"]],
  ["evaluations", "Evaluations", ["evaluations", "evaluation"]],
  ["untrained", "Untrained", ["untrained"]],
  ["prompts", "Prompts", ["prompts", "prompt"]],
  ["ledger", "Ledger", ["ledger"]],
  ["search", "Search", ["search"]],
];

function drawTop(): void {
  const { run, live, made, state, untrained } = context.overview;
  const kind = routeOf(location.hash).words[0] ?? "run";
  const left = untrained.failed + untrained.filtered;
  const phase = h("span.phase", { class: live && "live", title: `data of ${clock(made)}` }, live ? "live" : (state.phase ?? "written"));
  const tab = ([to, name, kinds]: (typeof TABS)[number]): HTMLElement =>
    h(
      "a",
      { href: `#/${to}`, "aria-current": kinds.includes(kind) && "page" },
      name,
      to === "untrained" && left > 0 && h("span.count", number(left)),
    );
  const theme = h("button.plain", { "aria-label": "Dark or light", title: "Dark or light (t)", click: switchTheme }, isDark() ? "☀" : "☾");
  top.replaceChildren(
    h(
      "div.run-name",
      h("a", { href: "#/run" }, h("bdi", run)),
      phase,
      label(`step ${number(state.step)}`, state.num_rollout !== null && ` of ${number(state.num_rollout)}`),
    ),
    h("nav", { "aria-label": "Views" }, TABS.map(tab)),
    h("div.switches", theme, h("button.plain", { "aria-label": "Keys", title: "Keys (?)", click: help }, "?")),
  );
  top.querySelector("nav [aria-current]")?.scrollIntoView({ inline: "nearest", block: "nearest" });
}

const systemIsDark = matchMedia("(prefers-color-scheme: dark)");

function isDark(): boolean {
  return document.documentElement.dataset["theme"] === "dark";
}

function showTheme(dark: boolean): void {
  document.documentElement.dataset["theme"] = dark ? "dark" : "light";
}

function switchTheme(): void {
  showTheme(!isDark());
  stored(() => localStorage.setItem(THEME, isDark() ? "dark" : "light"));
  drawTop();
}

/** The theme that was chosen here earlier, or the system's. */
function firstTheme(): void {
  const chosen = stored(() => localStorage.getItem(THEME));
  showTheme(chosen ? chosen === "dark" : systemIsDark.matches);
  if (!chosen) systemIsDark.addEventListener("change", () => showTheme(systemIsDark.matches));
}

/** A page that was opened as a file may have no storage: a choice then lasts until it is closed. */
function stored<T>(act: () => T): T | null {
  try {
    return act();
  } catch {
    return null;
  }
}

const KEYS: [string, string, (() => void)?][] = [
  ["j / k", "next or previous step, group, sample or prompt"],
  ["Esc", "from a sample to its group, from a group to its step"],
  ["← →", "the same as k and j"],
  ["↑ ↓", "in a list: another row"],
  ["1 … 5", "at a sample: colour tokens by mask, policy version, log-prob, advantage, gap"],
  ["/", "search", () => go("#/search")],
  ["r", "run", () => go("#/run")],
  ["s", "steps", () => go("#/steps")],
  ["e", "evaluations", () => go("#/evaluations")],
  ["u", "untrained", () => go("#/untrained")],
  ["p", "prompts", () => go("#/prompts")],
  ["l", "ledger", () => go("#/ledger")],
  ["t", "dark or light", switchTheme],
  ["?", "these keys", help],
];

function help(): void {
  const dialog = h(
    "dialog",
    { "aria-label": "Keys", close: () => dialog.remove() },
    h("h2", "Keys"),
    factList(KEYS.map(([key, text]) => [h("kbd", key), text]), "facts keys"),
    h("button.button", { click: () => dialog.close() }, "Close"),
  );
  document.body.append(dialog);
  dialog.showModal();
}

function press(event: KeyboardEvent): void {
  const target = event.target as HTMLElement;
  if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented || document.querySelector("dialog[open]")) return;
  if (event.key === "Escape" && target.matches("input, select")) return target.blur();
  if (target.matches("input[type=search], select, textarea")) return;
  const to = { j: view?.next, k: view?.previous, ArrowRight: view?.next, ArrowLeft: view?.previous, Escape: view?.parent }[event.key];
  const act = view?.keys?.[event.key] ?? KEYS.find(([key]) => key === event.key)?.[2];
  const isArrow = event.key.startsWith("Arrow");
  if (isArrow && target.closest("input, .cards, .tokens, svg")) return;
  if (!to && !act) return;
  event.preventDefault();
  if (to) go(to);
  else act?.();
}

async function poll(): Promise<void> {
  if (document.hidden || !context.overview.live) return;
  try {
    const overview = await load<Overview>("overview", true);
    const old = context.overview;
    context.overview = overview;
    const isLonger = overview.steps.step.length !== old.steps.step.length || overview.evals.length !== old.evals.length;
    if (isLonger) forget("prompts");
    if (overview.untrained.failed + overview.untrained.filtered !== old.untrained.failed + old.untrained.filtered) forget("untrained");
    drawTop();
    if (isLonger) side.refresh(overview);
    if (overview.state.step !== old.state.step || view?.title === "Ledger") view?.refresh?.(overview);
    if (isLonger && view?.side && !view.parent && !view.next) void open(); // the last step may have a next one now
  } catch {
    say("The run's server does not answer. The page keeps what it has.");
  }
}

async function start(): Promise<void> {
  firstTheme();
  try {
    const overview = await load<Overview>("overview");
    if (overview.version !== VERSION) throw new Error(`The data have version ${overview.version}, this page reads ${VERSION}. Run headrace view again.`);
    context = { overview, content, go, say };
  } catch (error) {
    content.replaceChildren(page({ title: "headrace view" }, h("p.verdict.bad", (error as Error).message)).element);
    return;
  }
  document.querySelector<HTMLElement>(".skip")!.addEventListener("click", (event) => {
    event.preventDefault();
    content.focus();
  });
  addEventListener("hashchange", () => void open());
  document.addEventListener("keydown", press);
  await open();
  setInterval(() => void poll(), POLL_MILLISECONDS);
  document.addEventListener("visibilitychange", () => void poll());
}

void start();
