// The ledger as a flow: where groups are, what left it and why, and how stale trained samples were.
import type { Ledger, Overview } from "./data";
import { factList, h, label, section } from "./dom";
import { clock, count, fact, number, percent } from "./format";
import type { Context, Route, View } from "./view";

type Exit = [state: string, meaning: string];
const FLOW: [state: string, meaning: string, exits: Exit[]][] = [
  ["QUEUED", "wait for a producer", []],
  ["LEASED", "are generated and scored", [["DROPPED", "a filter rejected them"], ["FAILED", "no attempts are left"]]],
  ["READY", "wait for the trainer", [["EXPIRED", "too stale to train"]]],
  ["CONSUMED", "trained, not yet in a checkpoint", []],
  ["COMMITTED", "trained, in a checkpoint", []],
];

export function ledgerView(_: Route, context: Context): View {
  const element = h("div.page.ledger");
  const draw = (overview: Overview): void => element.replaceChildren(...contents(overview.ledger, overview));
  draw(context.overview);
  return { title: "Ledger", element, refresh: draw };
}

function contents(ledger: Ledger, overview: Overview): HTMLElement[] {
  const staleness = (ledger.staleness ?? []).map(([steps, share]): [string, number] => [steps === 8 ? "8 and more steps" : count(steps, "step"), share]);
  return [
    h("h1", "Ledger"),
    h("p.summary", source(ledger, overview)),
    ledger.states
      ? flow(ledger.states)
      : h("p.empty", "The buffer could not be asked, so there are no counts of states here. `headrace view` asks it while the run is live."),
    h(
      "div.columns",
      bars("Failures by reason", ledger.failures, "No sample failed."),
      bars("Filtered by reason", ledger.filtered, "No filter dropped a group."),
      bars("Staleness of trained samples", staleness, "The metrics say nothing about staleness.", true),
    ),
  ];
}

function flow(states: Record<string, number>): HTMLElement {
  const state = (name: string, meaning: string): HTMLElement =>
    h("div.state", { class: !states[name] && "zero" }, h("span.name", name.toLowerCase()), h("b", number(states[name] ?? 0)), label(meaning));
  const steps = FLOW.map(([name, meaning, exits]) =>
    h("li", state(name, meaning), exits.length > 0 && h("ul", exits.map(([exit, why]) => h("li", state(exit, why))))),
  );
  return section("Groups by state", h("ol.flow", steps));
}

function source(ledger: Ledger, overview: Overview): (HTMLElement | string)[] {
  const produced = ledger.produced === null ? [] : [fact("samples produced", number(ledger.produced))];
  if (ledger.source === "metrics" || ledger.time === null) return [h("span", "From the run's metrics: the buffer was not asked."), ...produced];
  const text = overview.live ? "Live: counts of the buffer at" : "The buffer's last counts, of";
  return [h("span", `${text} ${clock(ledger.time)}.`), ...produced];
}

function bars(title: string, rows: [string, number][], none: string, isShare = false): HTMLElement {
  const most = Math.max(...rows.map(([, value]) => value), 1e-9);
  const row = ([name, value]: [string, number]): [HTMLElement | string, HTMLElement[]] => [
    isShare ? name : h("a", { href: `#/untrained?reason=${encodeURIComponent(name)}` }, name || "(none given)"),
    [h("b", isShare ? percent(value) : number(value)), h("span.track", h("i", { style: { width: `${Math.max(1, (100 * value) / most)}%` } }))],
  ];
  return section(title, rows.length > 0 ? factList(rows.map(row), "facts bars") : h("p.empty", none));
}
