// The list beside a step or an evaluation: all of them, with their mean reward.
import type { Overview } from "./data";
import { h, label, VirtualList } from "./dom";
import { type Domain, link, number, rewardDomain, sparkline, spread } from "./format";
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
    if (!side) return;
    const isOther = side.kind !== this.kind || side.chosen !== this.chosen;
    this.chosen = side.chosen;
    if (side.kind !== this.kind) this.fill(side.kind, overview);
    this.list?.refresh();
    const index = this.entries.findIndex((entry) => entry.step === side.chosen);
    if (isOther && index >= 0) this.list?.reveal(index);
  }

  /** Takes the steps of a new overview. */
  refresh(overview: Overview): void {
    if (this.kind) this.fill(this.kind, overview);
  }

  private fill(kind: Kind, overview: Overview): void {
    this.entries = entriesOf(kind, overview);
    const means = this.entries.map((entry) => entry.mean);
    this.domain = rewardDomain(means);
    const title = kind === "steps" ? "Steps" : "Evaluations";
    const top = this.scroller.scrollTop;
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
    return h(
      "a.row.steps",
      { href: link(kind === "steps" ? "step" : "evaluation", step), "aria-current": step === this.chosen && "page" },
      h("span.number", step),
      h("span.track", mean !== null && h("i", { style: { width: `${Math.max(2, 100 * share)}%` } })),
      h("span.mean", number(mean)),
    );
  }
}

function entriesOf(kind: Kind, { metrics, evaluations, steps, evals }: Overview): Entry[] {
  const { step, columns } = kind === "steps" ? metrics : evaluations;
  const names = Object.keys(columns).filter((name) => (kind === "steps" ? name === "reward/mean" : name.startsWith("eval/")));
  const meanAt = (index: number): number | null => spread(names.map((name) => columns[name]![index] ?? null)).mean;
  const means = new Map(step.map((each, index) => [each, meanAt(index)]));
  return (kind === "steps" ? steps.step : evals).map((each) => ({ step: each, mean: means.get(each) ?? null }));
}
