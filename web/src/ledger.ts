// The ledger as a flow: where groups are, what left it and why, and how stale trained samples were.
import type { Ledger, Overview } from "./data";
import { h, label } from "./dom";
import { clock, fact, number, percent } from "./format";
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
  const element = h("div", { class: "page ledger" });
  const draw = (overview: Overview): void => element.replaceChildren(...contents(overview.ledger, overview));
  draw(context.overview);
  return { title: "Ledger", element, refresh: draw };
}

function contents(ledger: Ledger, overview: Overview): HTMLElement[] {
  const { states } = ledger;
  return [
    h("div", { class: "bar" }, h("h1", {}, "Ledger")),
    h("p", { class: "summary" }, source(ledger, overview)),
    states
      ? h(
          "section",
          { "aria-label": "Groups by state" },
          h("h2", {}, "Groups by state"),
          h(
            "ol",
            { class: "flow" },
            FLOW.map(([name, meaning, exits]) =>
              h("li", {}, state(name, meaning, states), exits.length > 0 && h("ul", {}, exits.map(([exit, why]) => h("li", {}, state(exit, why, states))))),
            ),
          ),
        )
      : h("p", { class: "empty" }, "The buffer could not be asked, so there are no counts of states here. `headrace view` asks it while the run is live."),
    h(
      "div",
      { class: "columns" },
      bars("Failures by reason", ledger.failures, "samples", "No sample failed.", "#/untrained?reason="),
      bars("Filtered by reason", ledger.filtered, "samples", "No filter dropped a group.", "#/untrained?reason="),
      bars(
        "Staleness of trained samples",
        (ledger.staleness ?? []).map(([steps, share]) => [steps === 8 ? "8 and more steps" : steps === 1 ? "1 step" : `${steps} steps`, share]),
        "share",
        "The metrics say nothing about staleness.",
      ),
    ),
  ];
}

function source(ledger: Ledger, overview: Overview): (HTMLElement | string)[] {
  const produced = ledger.produced === null ? [] : [fact("samples produced", number(ledger.produced))];
  if (ledger.source === "metrics" || ledger.time === null) return [h("span", {}, "From the run's metrics: the buffer was not asked."), ...produced];
  const text = overview.live ? "Live: counts of the buffer at" : "The buffer's last counts, of";
  return [h("span", {}, `${text} ${clock(ledger.time)}.`), ...produced];
}

function state(name: string, meaning: string, states: Record<string, number>): HTMLElement {
  const groups = states[name] ?? 0;
  return h("div", { class: groups ? "state" : "state zero" }, h("span", { class: "name" }, name.toLowerCase()), h("b", {}, number(groups)), label(meaning));
}

function bars(title: string, rows: [string, number][], unit: "samples" | "share", none: string, href = ""): HTMLElement {
  const most = Math.max(...rows.map(([, value]) => value), 1e-9);
  return h(
    "section",
    { "aria-label": title },
    h("h2", {}, title),
    rows.length === 0
      ? h("p", { class: "empty" }, none)
      : h(
          "table",
          { class: "bars" },
          h("thead", {}, h("tr", {}, h("th", { scope: "col" }, unit === "share" ? "behind" : "reason"), h("th", { scope: "col" }, unit), h("td", {}))),
          h(
            "tbody",
            {},
            rows.map(([name, value]) =>
              h(
                "tr",
                {},
                h("th", { scope: "row" }, href ? h("a", { href: href + encodeURIComponent(name) }, name || "(none given)") : name),
                h("td", {}, unit === "share" ? percent(value) : number(value)),
                h("td", { class: "track" }, h("i", { style: { width: `${Math.max(1, (100 * value) / most)}%` } })),
              ),
            ),
          ),
        ),
  );
}
