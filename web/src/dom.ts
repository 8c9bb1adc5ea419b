// Elements, made without HTML: texts of models are only ever text.

export type Child = Node | string | number | null | undefined | false;
type Props = Record<string, unknown>;

function build<E extends Element>(element: E, props: Props, children: Child[]): E {
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value as EventListener);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  append(element, children);
  return element;
}

export function append(parent: Element, children: Child[]): void {
  for (const child of children) {
    if (child === null || child === undefined || child === false) continue;
    parent.append(child instanceof Node ? child : String(child));
  }
}

export const h = <K extends keyof HTMLElementTagNameMap>(tag: K, props: Props = {}, ...children: Child[]) =>
  build(document.createElement(tag), props, children);

export const svg = <K extends keyof SVGElementTagNameMap>(tag: K, props: Props = {}, ...children: Child[]) =>
  build(document.createElementNS("http://www.w3.org/2000/svg", tag), props, children);

/** A list whose rows all have one height: only those that are seen exist. */
export function virtualList(label: string, count: number, rowHeight: number, row: (index: number) => HTMLElement) {
  const inner = h("div", { class: "rows" });
  const outer = h("div", { class: "list", tabindex: "0", role: "region", "aria-label": label }, inner);
  inner.style.height = `${count * rowHeight}px`;
  let first = -1;
  let last = -1;
  const draw = () => {
    const from = Math.max(0, Math.floor(outer.scrollTop / rowHeight) - 4);
    const to = Math.min(count, Math.ceil((outer.scrollTop + (outer.clientHeight || 800)) / rowHeight) + 4);
    if (from === first && to === last) return;
    [first, last] = [from, to];
    const rows: HTMLElement[] = [];
    for (let index = from; index < to; index++) {
      const element = row(index);
      element.style.top = `${index * rowHeight}px`;
      element.style.height = `${rowHeight}px`;
      rows.push(element);
    }
    inner.replaceChildren(...rows);
  };
  outer.addEventListener("scroll", draw, { passive: true });
  new ResizeObserver(draw).observe(outer);
  const show = (index: number) => {
    const top = index * rowHeight;
    if (top < outer.scrollTop) outer.scrollTop = top;
    else if (top + rowHeight > outer.scrollTop + outer.clientHeight) outer.scrollTop = top + rowHeight - outer.clientHeight;
    draw();
  };
  return { element: outer, show, redraw: () => ((first = -1), draw()) };
}

const MOST_CHARACTERS = 4000;

/** A text with its line breaks; a long one is cut, with a button that shows the rest. */
export function text(content: string, className = "text"): HTMLElement {
  const box = h("div", { class: className, dir: "auto" });
  if (content.length <= MOST_CHARACTERS) box.append(content);
  else {
    const rest = content.length - MOST_CHARACTERS;
    const more = h("button", { class: "more", onclick: () => box.replaceChildren(content) }, `show ${count(rest)} more characters`);
    append(box, [content.slice(0, MOST_CHARACTERS), "… ", more]);
  }
  return box;
}

export const count = (value: number) => value.toLocaleString("en");

export function number(value: number | null | undefined, digits = 3): string {
  if (value === null || value === undefined) return "–";
  if (Number.isInteger(value) && Math.abs(value) < 1e6) return count(value);
  const size = Math.abs(value);
  if (size >= 1e5 || size < 1e-4) return value.toExponential(2);
  return String(Number(value.toPrecision(digits)));
}

export const mean = (values: number[]) => (values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null);

export function spread(values: number[]): number | null {
  const middle = mean(values);
  return middle === null ? null : Math.sqrt(values.reduce((sum, value) => sum + (value - middle) ** 2, 0) / values.length);
}

export const firstLine = (content: string) => content.trim().split("\n").slice(-1)[0] || content.trim() || "(empty)";

export function clock(seconds: number): string {
  return new Date(seconds * 1000).toISOString().slice(0, 19).replace("T", " ") + " UTC";
}
