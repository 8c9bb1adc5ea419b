// The list beside a step or an evaluation: all of them, with their mean reward.
import type { Numbers, Overview } from "./data";
import { h, label, VirtualList } from "./dom";
import { diverging, type Domain, link, number, sparkline, spread } from "./format";
import type { View } from "./view";

type Kind = "steps" | "evaluations";

interface Entry {
  step: number;
  mean: number | null;
}

export class Side {
  private kind: Kind | null = null;
  private entries: Entry[] = [];
  private domain: Domain = [0, 1];
  private chosen: number | null = null;
  private readonly scroller = h("div.scroller");
  private list: VirtualList<Entry> | null = null;

  constructor(private readonly element: HTMLElement) {}

  show(side: View["side"], overview: Overview): void {
    this.element.hidden = side === undefined;
    if (!side || (side.kind === this.kind && side.chosen === this.chosen)) return;
    this.chosen = side.chosen;
    if (side.kind === this.kind) this.list?.refresh();
    else this.fill(side.kind, overview);
    const index = this.entries.findIndex((entry) => entry.step === side.chosen);
    if (index >= 0) this.list?.reveal(index);
  }

  /** Takes the steps of a new overview. */
  refresh(overview: Overview): void {
    if (this.kind) this.fill(this.kind, overview);
  }

  private fill(kind: Kind, overview: Overview): void {
    this.entries = kind === "steps" ? stepEntries(overview) : evaluationEntries(overview);
    const means = this.entries.map((entry) => entry.mean);
    const { low, high } = spread(means);
    this.domain = [Math.min(0, low), Math.max(1, high)];
    const title = kind === "steps" ? "Steps" : "Evaluations";
    const top = this.scroller.scrollTop;
    this.list?.close();
    this.list = new VirtualList<Entry>(this.scroller, (entry) => this.row(entry, kind), title, "steps");
    this.scroller.replaceChildren(this.list.element);
    this.element.setAttribute("aria-label", title);
    const head = h("div.side-head", h("b", title), label("mean reward"), sparkline(means, 200, 34, `Mean reward of ${title}`));
    this.element.replaceChildren(head, this.scroller);
    this.list.show(this.entries);
    if (kind === this.kind) this.scroller.scrollTop = top;
    this.kind = kind;
  }

  private row({ step, mean }: Entry, kind: Kind): HTMLElement {
    const share = mean === null ? 0 : (mean - this.domain[0]) / (this.domain[1] - this.domain[0]);
    const style = { width: `${Math.max(2, 100 * share)}%`, "background-color": diverging(mean ?? 0, this.domain, 0.85) };
    return h(
      "a.row.steps",
      { href: link(kind === "steps" ? "step" : "evaluation", step), "aria-current": step === this.chosen && "page" },
      h("span.number", step),
      h("span.track", mean !== null && h("i", { style })),
      h("span.mean", number(mean)),
    );
  }
}

function stepEntries({ metrics, steps }: Overview): Entry[] {
  const means = new Map(metrics.step.map((each, index) => [each, metrics.columns["reward/mean"]?.[index] ?? null]));
  return steps.step.map((step) => ({ step, mean: means.get(step) ?? null }));
}

function evaluationEntries({ evaluations, evals }: Overview): Entry[] {
  const sets: Numbers[] = Object.entries(evaluations.columns).filter(([name]) => name.startsWith("eval/")).map(([, values]) => values);
  const means = new Map(evaluations.step.map((each, index) => [each, spread(sets.map((values) => values[index] ?? null)).mean]));
  return evals.map((step) => ({ step, mean: means.get(step) ?? null }));
}
