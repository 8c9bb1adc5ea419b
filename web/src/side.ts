// The list beside a step or an evaluation: all of them, with their mean reward.
import type { Numbers, Overview } from "./data";
import { h, label, VirtualList } from "./dom";
import { diverging, type Domain, link, number, sparkline, spread } from "./format";

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
  private list: VirtualList<Entry> | null = null;
  private readonly scroller = h("div", { class: "scroller" });

  constructor(private readonly element: HTMLElement) {}

  show(side: { kind: Kind; chosen: number | null } | undefined, overview: Overview): void {
    this.element.hidden = side === undefined;
    if (!side) return;
    const isOther = side.kind !== this.kind || this.chosen !== side.chosen;
    this.chosen = side.chosen;
    if (side.kind !== this.kind) this.fill(side.kind, overview);
    if (!isOther) return;
    this.list?.refresh();
    const index = this.entries.findIndex((entry) => entry.step === side.chosen);
    if (index >= 0) this.list?.reveal(index);
  }

  /** Takes the steps of a new overview. */
  refresh(overview: Overview): void {
    if (this.kind) this.fill(this.kind, overview);
  }

  private fill(kind: Kind, overview: Overview): void {
    const isNew = kind !== this.kind;
    this.kind = kind;
    this.entries = kind === "steps" ? stepEntries(overview) : evaluationEntries(overview);
    const { low, high } = spread(this.entries.map((entry) => entry.mean));
    this.domain = [Math.min(0, low), Math.max(1, high)];
    const title = kind === "steps" ? "Steps" : "Evaluations";
    if (isNew || !this.list) {
      this.list?.close();
      this.list = new VirtualList<Entry>(this.scroller, (entry) => this.row(entry), title, "steps");
      this.scroller.replaceChildren(this.list.element);
      this.element.setAttribute("aria-label", title);
    }
    const means = this.entries.map((entry) => entry.mean);
    this.element.replaceChildren(
      h("div", { class: "side-head" }, h("b", {}, title), label("mean reward"), sparkline(means, 200, 34, `Mean reward of ${title}`)),
      this.scroller,
    );
    this.list.show(this.entries);
  }

  private row({ step, mean }: Entry): HTMLElement {
    const share = mean === null ? 0 : (mean - this.domain[0]) / (this.domain[1] - this.domain[0]);
    const style = { width: `${Math.max(2, 100 * share)}%`, "background-color": diverging(mean ?? 0, this.domain, 0.85) };
    return h(
      "a",
      { class: "row steps", href: link(this.kind === "steps" ? "step" : "evaluation", step), "aria-current": step === this.chosen ? "page" : null },
      h("span", { class: "number" }, step),
      h("span", { class: "track" }, mean !== null && h("i", { style })),
      h("span", { class: "mean" }, number(mean)),
    );
  }
}

function stepEntries(overview: Overview): Entry[] {
  const { step, columns } = overview.metrics;
  const means = new Map(step.map((each, index) => [each, columns["reward/mean"]?.[index] ?? null]));
  return overview.steps.step.map((each) => ({ step: each, mean: means.get(each) ?? null }));
}

function evaluationEntries(overview: Overview): Entry[] {
  const { step, columns } = overview.evaluations;
  const sets: Numbers[] = Object.entries(columns).filter(([name]) => name.startsWith("eval/")).map(([, values]) => values);
  const means = new Map(step.map((each, index) => [each, spread(sets.map((values) => values[index] ?? null)).mean]));
  return overview.evals.map((each) => ({ step: each, mean: means.get(each) ?? null }));
}
