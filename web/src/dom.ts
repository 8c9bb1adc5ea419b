// Elements, and lists of which only the visible rows exist. Texts always become text nodes.

export type Child = Node | string | number | null | undefined | false | Child[];
type Value = string | number | boolean | null | undefined | ((event: never) => void) | Record<string, string>;
type Attributes = Record<string, Value>;
type Of<Name, Elements> = Name extends `${infer Tag extends keyof Elements & string}.${string}`
  ? Elements[Tag]
  : Name extends keyof Elements
    ? Elements[Name]
    : never;

function isAttributes(part: Attributes | Child): part is Attributes {
  return typeof part === "object" && part !== null && !Array.isArray(part) && !(part instanceof Node);
}

function fill<E extends Element>(element: E, classes: string[], parts: (Attributes | Child)[]): E {
  if (classes.length) element.setAttribute("class", classes.join(" "));
  for (const part of parts) if (isAttributes(part)) setAll(element, part); else append(element, [part]);
  return element;
}

function setAll(element: Element, attributes: Attributes): void {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") element.addEventListener(name, value as EventListener);
    else if (typeof value === "object") for (const [key, text] of Object.entries(value)) (element as HTMLElement).style.setProperty(key, text);
    else if (name === "class") element.classList.add(...String(value).split(" ").filter(Boolean));
    else element.setAttribute(name, value === true ? "" : String(value));
  }
}

export function append(element: Element, children: Child[]): void {
  for (const child of children) {
    if (Array.isArray(child)) append(element, child);
    else if (child !== null && child !== undefined && child !== false)
      element.append(typeof child === "number" ? String(child) : child);
  }
}

/** An HTML element by its tag and classes, as `a.row`. Of its attributes, functions are listeners and an object is its style. */
export function h<Name extends string>(name: Name, ...parts: (Attributes | Child)[]): Of<Name, HTMLElementTagNameMap> {
  const [tag = "", ...classes] = name.split(".");
  return fill(document.createElement(tag), classes, parts) as Of<Name, HTMLElementTagNameMap>;
}

/** An element of a drawing, likewise. */
export function svg<Name extends string>(name: Name, ...parts: (Attributes | Child)[]): Of<Name, SVGElementTagNameMap> {
  const [tag = "", ...classes] = name.split(".");
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), classes, parts) as Of<Name, SVGElementTagNameMap>;
}

export function section(title: string, ...children: Child[]): HTMLElement {
  return h("section", { "aria-label": title }, h("h2", title), children);
}

/** Quiet text. */
export function label(...children: Child[]): HTMLElement {
  return h("span.label", children);
}

/** Shows the first few of many, and a button that makes way for the next ones. */
export function shownInParts(box: HTMLElement, size: number, atOnce: number, noun: string, show: (from: number, to: number) => void): void {
  const add = (from: number): void => {
    const to = Math.min(size, from + atOnce);
    show(from, to);
    if (to === size) return;
    const text = `Show ${Math.min(size - to, atOnce)} more of ${size - to} ${noun}`;
    const button = h("button.more", { click: () => (button.remove(), add(to)) }, text);
    box.append(button);
  };
  add(0);
}

/** Folded text that is laid out when it is opened for the first time. */
export function folded(summary: Child, isOpen: boolean, content: () => Child, className = ""): HTMLDetailsElement {
  const element = h("details", { class: className }, h("summary", summary));
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
export function choice<T extends string>(label: string, options: readonly [T, string][], value: T, pick: (value: T) => void): HTMLElement {
  const radio = (key: T): HTMLElement =>
    h("input", { type: "radio", name: `choice-${label}`, value: key, checked: key === value, change: () => pick(key) });
  return h("fieldset.choice", h("legend", label), options.map(([key, text]) => h("label", radio(key), h("span", text))));
}

/** A choice of many, as a list that opens. */
export function select(label: string, options: readonly [string, string][], value: string, pick: (value: string) => void): HTMLElement {
  const list = h(
    "select",
    { name: label, change: () => pick(list.value) },
    options.map(([key, text]) => h("option", { value: key, selected: key === value }, text)),
  );
  return h("label.inline", `${label} `, list);
}

/** Names and their values, one below the other. */
export function factList(facts: readonly (readonly [Child, Child])[], className = "facts"): HTMLElement {
  return h("dl", { class: className }, facts.map(([name, value]) => h("div", h("dt", name), h("dd", value))));
}

const SPARE_ROWS = 6; // beyond each edge of the window

/** A list with rows of one height, inside an element that scrolls. It ends when it has left the page. */
export class VirtualList<T> {
  readonly element: HTMLElement;
  private items: readonly T[] = [];
  private rows = new Map<number, HTMLElement>();
  private height = 40;
  private readonly end = new AbortController();

  constructor(
    private readonly scroller: HTMLElement,
    private readonly row: (item: T, index: number) => HTMLElement,
    label: string,
    className: string,
  ) {
    this.element = h(`div.rows.${className}`, { role: "list", "aria-label": label });
    this.element.addEventListener("keydown", (event) => this.move(event));
    for (const [target, name] of [[scroller, "scroll"], [window, "resize"]] as const)
      target.addEventListener(name, () => (this.element.isConnected ? this.measure() : this.end.abort()), { passive: true, signal: this.end.signal });
  }

  /** Shows other items. The position stays. */
  show(items: readonly T[]): void {
    this.items = items;
    this.refresh();
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
    this.measure();
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
      const place = { role: "listitem", "aria-setsize": this.items.length, "aria-posinset": index + 1 };
      const item = h("div", place, this.row(this.items[index]!, index));
      item.style.top = `${index * this.height}px`;
      this.rows.set(index, item);
      const after = [...this.element.children].find((each) => Number(each.ariaPosInSet) > index + 1);
      this.element.insertBefore(item, after ?? null);
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
