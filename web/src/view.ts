// What a view is given and what it gives back.
import type { Overview } from "./data";

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
  left?: () => void;
}

export interface Context {
  overview: Overview;
  content: HTMLElement; // the element that scrolls
  go: (href: string, replace?: boolean) => void;
  say: (text: string) => void; // to a screen reader, and shown for some seconds
}
