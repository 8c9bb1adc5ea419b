// What a view is given and what it gives back, and the head that every page has.
import type { Overview } from "./data";
import { type Child, h } from "./dom";

/** The part of a link behind `#/`, taken apart. */
export interface Route {
  words: string[];
  query: URLSearchParams;
}

export interface View {
  title: string;
  element: HTMLElement;
  /** Which list stands beside it, and what is chosen there */
  side?: { kind: "steps" | "evaluations"; chosen: number | null };
  previous?: string | undefined; // links for k and j
  next?: string | undefined;
  parent?: string | undefined; // for Escape
  keys?: Record<string, () => void>;
  /** Called when a live run has a new overview; a view without it stays as it is. */
  refresh?: (overview: Overview) => void;
  /** Called once the element is in the page. */
  shown?: () => void;
}

export interface Context {
  overview: Overview;
  content: HTMLElement; // the element that scrolls
  go: (href: string, replace?: boolean) => void;
}

export interface Head {
  title: string;
  above?: [href: string, name: string][]; // the pages that lead here, the nearest last
  beside?: Child; // the title
  noun?: string | undefined; // of what `previous` and `next` lead to
  previous?: string | undefined;
  next?: string | undefined;
}

/** A page with its head: the way to it, its title, and links to its neighbours. */
export function page({ title, above = [], beside, noun, previous, next }: Head, ...children: Child[]): View {
  const element = h(
    "div.page",
    above.length > 0 && h("p.crumbs", above.map(([href, name], index) => [index > 0 && " / ", h("a", { href }, name)])),
    h("div.bar", h("h1", title), beside, noun !== undefined && h("span.pager", pager(previous, "‹", `Previous ${noun}`), pager(next, "›", `Next ${noun}`))),
    children,
  );
  return { title: [title, ...above.map(([, name]) => name).reverse()].join(" · "), element, previous, next, parent: above.at(-1)?.[0] };
}

function pager(href: string | undefined, sign: string, label: string): HTMLElement {
  return href === undefined ? h("span.button.off", { "aria-hidden": "true" }, sign) : h("a.button", { href, "aria-label": label }, sign);
}

/** Links to the neighbours of one of many. */
export function neighbours<T>(items: readonly T[], at: number, to: (item: T) => string): Pick<View, "previous" | "next"> {
  const [before, after] = [items[at - 1], items[at + 1]];
  return { previous: before === undefined ? undefined : to(before), next: after === undefined ? undefined : to(after) };
}
