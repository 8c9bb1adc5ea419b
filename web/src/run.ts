// The run: curves, timeline, facts, and what is left out.
import { Crosshair, type Curve, type Frame, curveFigure, stackedFigure } from "./chart";
import type { Overview } from "./data";
import { h, label } from "./dom";
import { clock, count, link, number, seconds } from "./format";
import type { Context, Route, View } from "./view";

const FIRST_CURVES = ["reward/mean", "response_length/mean", "entropy", "grad_norm", "log_prob_diff/mean", "tokens_per_second"];
const TIMES = ["wait", "train", "publish", "save", "evaluate"];
const INNER_TIMES = ["fetch", "log_probs", "forward", "backward", "optimizer", "critic"];

export function runView({ query }: Route, context: Context): View {
  const element = h("div", { class: "page run" });
  const draw = (overview: Overview): void => element.replaceChildren(...contents(overview, query, context));
  draw(context.overview);
  return { title: "Run", element, refresh: draw };
}

function contents(overview: Overview, query: URLSearchParams, context: Context): HTMLElement[] {
  const { step, columns } = overview.metrics;
  const frame: Frame = {
    crosshair: new Crosshair(),
    steps: [step[0] ?? 0, step.at(-1) ?? 0],
    marks: overview.marks,
    open: (at) => context.go(link("step", at)),
  };
  const chosen = query.get("curves")?.split(",").filter((name) => name in columns) ?? FIRST_CURVES.filter((name) => name in columns);
  const show = (names: string[]): void => context.go(`#/run?curves=${names.map(encodeURIComponent).join(",")}`, true);
  return [
    h("h1", { class: "unseen" }, `Run ${overview.run}`),
    tiles(overview),
    ...(step.length === 0
      ? [h("p", { class: "empty" }, "No step is finished yet. Curves appear after the first one.")]
      : [
          h(
            "section",
            { "aria-label": "Curves" },
            h("div", { class: "bar" }, h("h2", {}, "Curves"), picker(Object.keys(columns), chosen, show)),
            h(
              "div",
              { class: "curves" },
              chosen.map((name) =>
                curveFigure(name, curvesOf(name, overview), frame, () => show(chosen.filter((each) => each !== name))),
              ),
            ),
            marksList(overview),
          ),
          timeline(overview, frame),
        ]),
    h("div", { class: "columns" }, facts(overview), remarks(overview)),
  ].filter((each): each is HTMLElement => each !== null);
}

function tiles(overview: Overview): HTMLElement {
  const { columns } = overview.metrics;
  const last = (name: string): number | null => columns[name]?.findLast((value) => value !== null) ?? null;
  const tile = (name: string, value: string, more = ""): HTMLElement =>
    h("div", { class: "tile" }, label(name), h("b", {}, value), label(more));
  const evaluations = Object.entries(overview.evaluations.columns).filter(([name]) => name.startsWith("eval/"));
  const reward = columns["reward/mean"]?.find((value) => value !== null) ?? null;
  const of = overview.state.num_rollout === null ? "" : `of ${number(overview.state.num_rollout)}`;
  return h(
    "div",
    { class: "tiles" },
    tile("step", number(overview.state.step), of),
    tile("mean reward", number(last("reward/mean")), reward === null ? "" : `${number(reward)} at first`),
    evaluations.slice(0, 2).map(([name, values]) => tile(name, number(values.at(-1) ?? null), `after step ${overview.evaluations.step.at(-1)}`)),
    tile("seconds a step", number(last("time/step_seconds")), last("tokens_per_second") === null ? "" : `${number(last("tokens_per_second"))} tokens/s`),
    tile("staleness", number(last("staleness/mean")), "steps behind"),
    tile("untrained samples", number(overview.untrained.failed + overview.untrained.filtered), `${number(overview.untrained.failed)} failed`),
  );
}

function curvesOf(name: string, overview: Overview): Curve[] {
  const { step, columns } = overview.metrics;
  const curves: Curve[] = [{ name, step, values: columns[name]! }];
  if (name !== "reward/mean") return curves;
  const evaluations = overview.evaluations;
  for (const [key, values] of Object.entries(evaluations.columns)) {
    if (!key.startsWith("eval/")) continue;
    const set = key.slice("eval/".length);
    const curve: Curve = { name: key, step: evaluations.step, values, hasPoints: true };
    const [low, high] = [evaluations.columns[`eval_low/${set}`], evaluations.columns[`eval_high/${set}`]];
    if (low && high) Object.assign(curve, { low, high });
    curves.push(curve);
  }
  return curves;
}

function picker(names: string[], chosen: string[], show: (names: string[]) => void): HTMLElement {
  const groups = new Map<string, string[]>();
  for (const name of names.sort()) {
    if (chosen.includes(name)) continue;
    const group = name.includes("/") ? name.slice(0, name.indexOf("/")) : "other";
    groups.set(group, [...(groups.get(group) ?? []), name]);
  }
  const select = h(
    "select",
    { name: "curve", "aria-label": "Add a curve", change: () => select.value && show([...chosen, select.value]) },
    h("option", { value: "" }, "Add a curve …"),
    [...groups].map(([group, members]) => h("optgroup", { label: group }, members.map((name) => h("option", { value: name }, name)))),
  );
  return select;
}

function marksList(overview: Overview): HTMLElement | null {
  if (!overview.marks.length) return null;
  return h(
    "ol",
    { class: "marks" },
    overview.marks.map(([step, text]) => h("li", {}, h("a", { href: link("step", step) }, `step ${step}`), ` ${text}`)),
  );
}

function timeline(overview: Overview, frame: Frame): HTMLElement | null {
  const { step, columns } = overview.metrics;
  const column = (name: string): (number | null)[] | undefined => columns[`time/${name}_seconds`];
  const parts: Curve[] = TIMES.filter((name) => column(name)?.some((value) => value)).map((name) => ({ name, step, values: column(name)! }));
  if (!parts.length) return null;
  const whole = column("step");
  if (whole) {
    const rest = whole.map((value, index) => (value === null ? null : Math.max(0, value - parts.reduce((sum, part) => sum + (part.values[index] ?? 0), 0))));
    if (rest.some((value, index) => (value ?? 0) > 0.01 * (whole[index] ?? 0))) parts.push({ name: "other", step, values: rest });
  }
  const inner: Curve[] = INNER_TIMES.filter((name) => column(name)?.some((value) => value)).map((name) => ({
    name: name.replace("_", "-"),
    step,
    values: column(name)!,
  }));
  return h(
    "section",
    { "aria-label": "Timeline" },
    h("h2", {}, "Timeline"),
    h(
      "div",
      { class: "curves" },
      stackedFigure("seconds of a step", seconds, parts, frame),
      inner.length > 0 && stackedFigure("seconds of training, in the ranks", seconds, inner, frame),
    ),
  );
}

function facts(overview: Overview): HTMLElement {
  return h(
    "section",
    { "aria-label": "Job" },
    h("h2", {}, "Job"),
    h("dl", { class: "facts" }, overview.job.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])),
  );
}

function remarks(overview: Overview): HTMLElement {
  const lines = overview.tokenizer.error ? [...overview.notes, overview.tokenizer.error] : overview.notes;
  return h(
    "section",
    { "aria-label": "Notes" },
    h("h2", {}, "Notes"),
    h(
      "ul",
      { class: "plain" },
      lines.map((note) => h("li", {}, note)),
      h("li", {}, `Written ${clock(overview.made)} by headrace ${overview.headrace}, from ${overview.folder}.`),
    ),
    overview.warnings.length > 0 && h("h3", {}, count(overview.warnings.length, "warning")),
    overview.warnings.length > 0 &&
      h(
        "ul",
        { class: "plain warnings" },
        overview.warnings.slice(-20).reverse().map(([step, text]) => h("li", {}, h("a", { href: link("step", step) }, `step ${step}`), ` ${text}`)),
      ),
  );
}
