// The run: curves, timeline, facts, and what is left out.
import { type Curve, type Frame, curveFigure, stackedFigure } from "./chart";
import type { Numbers, Overview } from "./data";
import { factList, h, section, select } from "./dom";
import { clock, count, link, seconds } from "./format";
import type { Context, Route, View } from "./view";

const FIRST_CURVES = ["reward/mean", "response_length/mean", "entropy", "grad_norm", "log_prob_diff/mean", "tokens_per_second"];
const TIMES = ["train", "publish", "save", "evaluate", "wait"];
const INNER_TIMES = ["fetch", "log_probs", "forward", "backward", "optimizer", "critic"];

export function runView({ query }: Route, context: Context): View {
  const element = h("div.page.run");
  const draw = (overview: Overview): void => element.replaceChildren(...contents(overview, query, context));
  draw(context.overview);
  return { title: "Run", element, refresh: draw };
}

function contents(overview: Overview, query: URLSearchParams, context: Context): HTMLElement[] {
  const { step } = overview.metrics;
  const frame: Frame = {
    crosshair: [],
    steps: [step[0] ?? 0, step.at(-1) ?? 0],
    marks: overview.marks,
    open: (at) => context.go(link("step", at)),
  };
  return [
    h("h1.unseen", `Run ${overview.run}`),
    ...(step.length ? [curves(overview, query, frame, context), timeline(overview, frame)] : [h("p.empty", "No step is finished yet. Curves appear after the first one.")]),
    h("div.columns", section("Job", factList(overview.job)), remarks(overview)),
  ];
}

function curves(overview: Overview, query: URLSearchParams, frame: Frame, context: Context): HTMLElement {
  const names = Object.keys(overview.metrics.columns);
  const chosen = (query.get("curves")?.split(",") ?? FIRST_CURVES).filter((name) => names.includes(name));
  const show = (curves: string[]): void => context.go(`#/run?curves=${curves.map(encodeURIComponent).join(",")}`, true);
  const others = names.filter((name) => !chosen.includes(name)).sort().map((name): [string, string] => [name, name]);
  return h(
    "section",
    { "aria-label": "Curves" },
    h("div.bar", h("h2", "Curves"), select("Add a curve", [["", "choose …"], ...others], "", (name) => show([...chosen, name]))),
    h("div.curves", chosen.map((name) => curveFigure(name, curvesOf(name, overview), frame, () => show(chosen.filter((each) => each !== name))))),
    overview.marks.length > 0 && h("ol.marks", overview.marks.map(stepNote)),
  );
}

/** A sentence about a step. */
function stepNote([step, text]: [number, string]): HTMLElement {
  return h("li", h("a", { href: link("step", step) }, `step ${step}`), ` ${text}`);
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

function timeline({ metrics: { step, columns } }: Overview, frame: Frame): HTMLElement {
  const timesOf = (names: string[]): Curve[] =>
    names.map((name) => ({ name, step, values: columns[`time/${name}_seconds`] ?? [] })).filter(({ values }) => values.some((value) => value));
  const [parts, inner] = [timesOf(TIMES), timesOf(INNER_TIMES)];
  const whole: Numbers = columns["time/step_seconds"] ?? [];
  const rest = whole.map((value, index) => value && Math.max(0, value - parts.reduce((sum, part) => sum + (part.values[index] ?? 0), 0)));
  if (rest.some((value, index) => (value ?? 0) > 0.01 * (whole[index] ?? 0))) parts.push({ name: "other", step, values: rest });
  return section(
    "Timeline",
    parts.length === 0 && h("p.empty", "The metrics have no times."),
    h(
      "div.curves",
      parts.length > 0 && stackedFigure("seconds of a step", seconds, parts, frame),
      inner.length > 0 && stackedFigure("seconds of training, in the ranks", seconds, inner, frame),
    ),
  );
}

function remarks(overview: Overview): HTMLElement {
  const { error } = overview.tokenizer;
  const written = `Written ${clock(overview.made)} by headrace ${overview.headrace}, from ${overview.folder}.`;
  const newest = overview.warnings.slice(-20).reverse();
  return section(
    "Notes",
    h("ul.plain", [...overview.notes, ...(error === null ? [] : [error]), written].map((note) => h("li", note))),
    newest.length > 0 && [h("h3", count(overview.warnings.length, "warning")), h("ul.plain.warnings", newest.map(stepNote))],
  );
}
