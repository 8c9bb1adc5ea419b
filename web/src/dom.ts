// Elements, and lists of which only the visible rows exist. Texts always become text nodes.

type Child = Node | string | number | null | undefined | false | Child[];
type Value = string | number | boolean | null | undefined | ((event: never) => void) | Record<string, string>;

function fill<E extends HTMLElement | SVGElement>(element: E, attributes: Record<string, Value>, children: Child[]): E {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") element.addEventListener(name, value as EventListener);
    else if (typeof value === "object") for (const [key, text] of Object.entries(value)) element.style.setProperty(key, text);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  append(element, children);
  return element;
}

export function append(element: Element, children: Child[]): void {
  for (const child of children) {
    if (Array.isArray(child)) append(element, child);
    else if (child !== null && child !== undefined && child !== false)
      element.append(typeof child === "number" ? String(child) : child);
  }
}

/** An HTML element: functions are listeners, an object is its style. */
export function h<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  attributes: Record<string, Value> = {},
  ...children: Child[]
): HTMLElementTagNameMap[K] {
  return fill(document.createElement(tag), attributes, children);
}

/** Quiet text. */
export function label(...children: Child[]): HTMLElement {
  return h("span", { class: "label" }, ...children);
}

/** A button that makes way for the next few of many. */
export function moreButton(left: number, atOnce: number, noun: string, show: () => void): HTMLElement {
  const text = `Show ${Math.min(left, atOnce)} more of ${left} ${noun}`;
  const button = h("button", { class: "more", click: () => (button.remove(), show()) }, text);
  return button;
}

/** An element of a drawing. */
export function svg<K extends keyof SVGElementTagNameMap>(
  tag: K,
  attributes: Record<string, Value> = {},
  ...children: Child[]
): SVGElementTagNameMap[K] {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

/** Folded text that is laid out when it is opened for the first time. */
export function folded(summary: Child, isOpen: boolean, content: () => Child, className = ""): HTMLDetailsElement {
  const element = h("details", { class: className }, h("summary", {}, summary));
  let isFilled = false;
  const open = (): void => {
    if (!isFilled) append(element, [content()]);
    isFilled = true;
  };
  if (isOpen) open();
  element.open = isOpen;
  element.addEventListener("toggle", () => element.open && open());
  return element;
}

/** A choice of a few, as a row of radio buttons. */
export function choice<T extends string>(label: string, options: [T, string][], value: T, pick: (value: T) => void): HTMLElement {
  const name = `choice-${label}`;
  return h(
    "fieldset",
    { class: "choice" },
    h("legend", {}, label),
    options.map(([key, text]) =>
      h("label", {}, h("input", { type: "radio", name, value: key, checked: key === value, change: () => pick(key) }), h("span", {}, text)),
    ),
  );
}

const SPARE_ROWS = 6; // beyond each edge of the window

/** A list with rows of one height, inside an element that scrolls. */
export class VirtualList<T> {
  readonly element: HTMLElement;
  /** Lets go of the element that scrolls. */
  readonly close: () => void;
  private items: readonly T[] = [];
  private rows = new Map<number, HTMLElement>();
  private height = 40;

  constructor(
    private readonly scroller: HTMLElement,
    private readonly row: (item: T, index: number) => HTMLElement,
    label: string,
    className: string,
  ) {
    this.element = h("div", { class: `rows ${className}`, role: "list", "aria-label": label });
    const draw = (): void => this.draw();
    const watch = new ResizeObserver(() => this.measure());
    scroller.addEventListener("scroll", draw, { passive: true });
    watch.observe(scroller);
    this.close = () => {
      scroller.removeEventListener("scroll", draw);
      watch.disconnect();
    };
    this.element.addEventListener("keydown", (event) => this.move(event));
  }

  /** Shows other items. The position stays. */
  show(items: readonly T[]): void {
    this.items = items;
    this.clear();
    if (this.element.isConnected) this.measure();
  }

  reveal(index: number): void {
    const top = this.offset + index * this.height;
    if (top < this.scroller.scrollTop) this.scroller.scrollTop = top;
    const lowest = top + this.height - this.scroller.clientHeight;
    if (lowest > this.scroller.scrollTop) this.scroller.scrollTop = lowest;
    this.draw();
  }

  /** Draws the rows anew, as after another one was chosen. */
  refresh(): void {
    this.clear();
    this.draw();
  }

  private get offset(): number {
    return this.element.getBoundingClientRect().top - this.scroller.getBoundingClientRect().top + this.scroller.scrollTop;
  }

  private measure(): void {
    const height = parseFloat(getComputedStyle(this.element).getPropertyValue("--row")) || 40;
    if (height !== this.height) this.clear();
    this.height = height;
    this.element.style.height = `${this.items.length * height}px`;
    this.draw();
  }

  private clear(): void {
    for (const row of this.rows.values()) row.remove();
    this.rows.clear();
  }

  private draw(): void {
    const above = this.scroller.scrollTop - this.offset;
    const first = Math.max(0, Math.floor(above / this.height) - SPARE_ROWS);
    const last = Math.min(this.items.length, Math.ceil((above + this.scroller.clientHeight) / this.height) + SPARE_ROWS);
    for (const [index, row] of this.rows) {
      if ((index < first || index >= last) && !row.contains(document.activeElement)) {
        row.remove();
        this.rows.delete(index);
      }
    }
    for (let index = first; index < last; index++) {
      if (this.rows.has(index)) continue;
      const item = h("div", { role: "listitem", "aria-setsize": this.items.length, "aria-posinset": index + 1 }, this.row(this.items[index]!, index));
      item.style.top = `${index * this.height}px`;
      this.rows.set(index, item);
      const after = [...this.rows.keys()].filter((each) => each > index).sort((a, b) => a - b)[0];
      this.element.insertBefore(item, after === undefined ? null : this.rows.get(after)!);
    }
  }

  private move(event: KeyboardEvent): void {
    const by = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10 }[event.key];
    const from = [...this.rows].find(([, row]) => row.contains(document.activeElement))?.[0];
    if (by === undefined || from === undefined) return;
    event.preventDefault();
    const index = Math.max(0, Math.min(this.items.length - 1, from + by));
    this.reveal(index);
    (this.rows.get(index)?.firstElementChild as HTMLElement | null)?.focus({ preventScroll: true });
    this.draw();
  }
}
