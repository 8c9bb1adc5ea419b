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
const status = document.getElementById("status")!; // for screen readers, and shown in a corner
const side = new Side(document.getElementById("side")!);

let context: Context;
let view: View | null = null;
let turn = 0; // of the last navigation: a slower earlier one is forgotten

function routeOf(hash: string): Route {
  const [path = "", query = ""] = hash.replace(/^#\/?/, "").split(/\?(.*)/s);
  return { words: path.split("/").filter(Boolean).map(decodeURIComponent), query: new URLSearchParams(query) };
}

const VIEWS: Record<string, (route: Route, context: Context) => View | Promise<View>> = {
  run: runView,
  steps: () => lastOf("steps"),
  evaluations: () => lastOf("evaluations"),
  prompts: promptsView,
  prompt: promptView,
  "prompt-of": promptOfView,
  ledger: ledgerView,
  search: searchView,
};

function viewOf(route: Route): View | Promise<View> {
  const form = route.words.at(-2); // "sample" or "group", before its id
  const inPlace = form === "sample" ? sampleView : form === "group" ? groupView : placeView;
  return (VIEWS[route.words[0] ?? "run"] ?? inPlace)(route, context);
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
  const slow = setTimeout(() => (status.textContent = "Loading …"), SLOW_MILLISECONDS);
  let next: View;
  try {
    next = await viewOf(routeOf(location.hash));
  } catch (error) {
    next = page({ title: "Not found" }, h("p.verdict.warn", (error as Error).message));
  } finally {
    clearTimeout(slow);
  }
  if (mine !== turn) return;
  status.textContent = "";
  const isSame = view?.title === next.title;
  const focused = isSame ? focusedControl() : null;
  const scroll = content.scrollTop;
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

function go(href: string, replace = false): void {
  if (!replace) location.hash = href;
  else {
    history.replaceState(null, "", href);
    void open();
  }
}

const TABS: [key: string, link: string, name: string][] = [
  ["r", "run", "Run"],
  ["s", "steps", "Steps"],
  ["e", "evaluations", "Evaluations"],
  ["u", "untrained", "Untrained"],
  ["p", "prompts", "Prompts"],
  ["l", "ledger", "Ledger"],
  ["/", "search", "Search"],
];

function drawTop(): void {
  const { run, live, made, state, untrained } = context.overview;
  const kind = /^#\/([^/?]+)/.exec(location.hash)?.[1] ?? "run";
  const left = untrained.failed + untrained.filtered;
  const phase = h("span.phase", { class: live && "live", title: `data of ${clock(made)}` }, live ? "live" : (state.phase ?? "written"));
  const tab = ([, to, name]: (typeof TABS)[number]): HTMLElement => {
    const isCurrent = to.startsWith(kind); // "steps" is current for a step
    return h("a", { href: `#/${to}`, "aria-current": isCurrent && "page" }, name, to === "untrained" && left > 0 && h("span.count", number(left)));
  };
  const theme = h("button.plain", { "aria-label": "Dark or light", title: "Dark or light (t)", click: switchTheme }, "◐");
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

function switchTheme(): void {
  const { style } = document.documentElement;
  const isDark = style.colorScheme ? style.colorScheme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  style.colorScheme = isDark ? "light" : "dark";
  stored(() => localStorage.setItem(THEME, style.colorScheme));
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
  ...TABS.map(([key, to, name]): [string, string, () => void] => [key, name.toLowerCase(), () => go(`#/${to}`)]),
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
    status.textContent = "The run's server does not answer. The page keeps what it has.";
  }
}

async function start(): Promise<void> {
  document.documentElement.style.colorScheme = stored(() => localStorage.getItem(THEME)) ?? ""; // without one, the system's
  try {
    const overview = await load<Overview>("overview");
    if (overview.version !== VERSION) throw new Error(`The data have version ${overview.version}, this page reads ${VERSION}. Run headrace view again.`);
    context = { overview, content, go };
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
  if (!context.overview.live) setTimeout(() => void load("prompts").catch(() => null), 1_000); // a live server would read the whole run for it
  setInterval(() => void poll(), POLL_MILLISECONDS);
  document.addEventListener("visibilitychange", () => void poll());
}

void start();
