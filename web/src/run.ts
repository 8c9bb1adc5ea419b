// The run as a whole: curves, timeline, job; and the ledger.

import { bars, chart, timeline, type Series } from "./charts";
import { clock, count, h, number } from "./dom";
import type { Ledger, Numbers, Overview } from "./data";

const CURVES: [string, string[]][] = [
  ["reward", ["reward/all/mean", "reward/mean"]],
  ["entropy (nats)", ["entropy"]],
  ["trainer − engine (nats)", ["log_prob_diff/mean"]],
  ["gradient norm", ["grad_norm"]],
  ["tokens a response", ["response_length/mean"]],
  ["loss", ["loss/policy", "loss/sft", "loss/kl"]],
  ["staleness (steps)", ["staleness/mean"]],
  ["tokens/s", ["tokens_per_second"]],
];
const PARTS = ["wait", "fetch", "log_probs", "forward", "backward", "optimizer", "critic", "publish", "save", "evaluate"];

let chosen: string[] = [];

const isSame = (one: Numbers | undefined, other: Numbers) => one !== undefined && one.every((value, index) => value === other[index]);

export function runView(overview: Overview): HTMLElement {
  const { metrics, evaluations, marks } = overview;
  const open = (step: number) => (location.hash = `#/step/${step}`);
  const series = (name: string): Series => ({ name, steps: metrics.step, values: metrics.columns[name] });
  const evaluated = Object.keys(evaluations.columns)
    .filter((name) => name.startsWith("eval/"))
    .map((name): Series => ({ name: name.replace("eval/", ""), steps: evaluations.step, values: evaluations.columns[name], dots: true }));
  const charts = h("div", { class: "charts" });
  if (evaluated.length) charts.append(chart("evaluations", evaluated, [], () => undefined));
  for (const [title, names] of CURVES) {
    const there = names.filter((name, index) => name in metrics.columns && !names.slice(0, index).some((other) => isSame(metrics.columns[other], metrics.columns[name])));
    if (there.length) charts.append(chart(title, there.map(series), marks, open));
  }
  for (const name of chosen) if (name in metrics.columns) charts.append(chart(name, [series(name)], marks, open));
  const others = Object.keys(metrics.columns).filter((name) => !chosen.includes(name)).sort();
  const more = h(
    "select",
    {
      "aria-label": "Add a curve",
      onchange: (event: Event) => {
        const name = (event.target as HTMLSelectElement).value;
        chosen = [...chosen, name];
        charts.append(chart(name, [series(name)], marks, open));
      },
    },
    h("option", { value: "" }, "add a curve …"),
    ...others.map((name) => h("option", { value: name }, name)),
  );
  const parts = PARTS.map((part): [string, Numbers] => [part, metrics.columns[`time/${part}_seconds`] ?? []]).filter(([, values]) => values.some((value) => value));
  if (parts.length) charts.append(timeline(metrics.step, parts, open));
  return h(
    "div",
    { class: "page" },
    h("h1", {}, overview.run),
    notes(overview),
    metrics.step.length ? charts : h("p", {}, "No step was trained yet."),
    metrics.step.length ? h("p", {}, more) : null,
    marks.length ? h("section", {}, h("h2", {}, "Changes"), lines(marks)) : null,
    overview.warnings.length ? h("section", {}, h("h2", {}, "Warnings"), lines(overview.warnings)) : null,
    h("section", {}, h("h2", {}, "Job"), facts([["folder", overview.folder], ...overview.job])),
  );
}

function notes(overview: Overview): HTMLElement {
  const said = [...overview.notes, ...(overview.tokenizer.error ? [`Token texts are missing: ${overview.tokenizer.error}.`] : [])];
  return h("div", { class: "notes" }, ...said.map((note) => h("p", {}, note)), h("p", {}, `Written ${clock(overview.made)} by headrace ${overview.headrace}.`));
}

const lines = (rows: [number, string][]) => h("ul", { class: "lines" }, ...rows.map(([step, text]) => h("li", {}, h("a", { href: `#/step/${step}` }, `step ${step}`), ` ${text}`)));

export const facts = (rows: [string, string][]) => h("dl", { class: "facts" }, ...rows.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));

const WAY = ["QUEUED", "LEASED", "READY", "CONSUMED", "COMMITTED"];
const MEANING: Record<string, string> = {
  QUEUED: "prompts that wait",
  LEASED: "being generated",
  READY: "complete, not trained",
  CONSUMED: "trained, not saved",
  COMMITTED: "trained and saved",
  DROPPED: "filtered",
  EXPIRED: "too old",
  FAILED: "without a sample",
};

export function ledgerView(overview: Overview): HTMLElement {
  const { ledger } = overview;
  const states = ledger.states;
  const state = (name: string) =>
    h("div", { class: `state ${name.toLowerCase()}` }, h("strong", {}, count(states?.[name] ?? 0)), h("span", {}, name.toLowerCase()), h("small", {}, MEANING[name] ?? ""));
  const way = WAY.flatMap((name, index) => (index ? [h("span", { class: "arrow", "aria-hidden": "true" }, "→"), state(name)] : [state(name)]));
  const beside = ["DROPPED", "EXPIRED", "FAILED"].filter((name) => name in (states ?? {}));
  return h(
    "div",
    { class: "page" },
    h("h1", {}, "Ledger"),
    h("p", { class: "quiet" }, source(ledger, overview.live)),
    states ? h("div", { class: "flow" }, ...way) : null,
    states ? h("div", { class: "flow beside" }, ...beside.map(state)) : null,
    ledger.produced === null ? null : h("p", {}, `${count(ledger.produced)} samples were produced.`),
    table("Why samples failed", ledger.failures, "No sample failed.", count),
    table("Why groups were filtered (samples)", ledger.filtered, "No group was filtered.", count),
    ledger.staleness ? table("Steps that trained samples are behind", ledger.staleness.map(([lag, share]) => [String(lag), share]), "", (share) => `${number(100 * share)} %`) : null,
    overview.untrained.failed + overview.untrained.filtered ? h("p", {}, h("a", { href: "#/untrained" }, "Look at the groups that were not trained")) : null,
  );
}

function source(ledger: Ledger, live: boolean): string {
  if (ledger.source === "metrics") return "The ledger could not be read here, so states are unknown. Reasons are those of the sample log.";
  const at = ledger.time === null ? "" : `, ${clock(ledger.time)}`;
  return live ? `Groups by state, as the buffer says${at}.` : `Groups by state at the end of the run${at}.`;
}

function table(title: string, rows: [string, number][], none: string, say: (value: number) => string): HTMLElement {
  return h("section", {}, h("h2", {}, title), rows.length ? bars(rows, say) : h("p", { class: "quiet" }, none));
}
