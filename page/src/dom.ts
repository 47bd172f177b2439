// Elements, made with text and never with markup: no name of a trace is ever more than text.

type Child = Node | string | null | undefined | false;
type Attributes = Record<string, string | number | boolean | null | undefined | ((event: any) => void)>;

export function h<K extends keyof HTMLElementTagNameMap>(tag: K, attributes: Attributes = {}, ...children: Child[]): HTMLElementTagNameMap[K] {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || (value === false && !name.startsWith("aria-"))) continue;
    if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true && !name.startsWith("aria-") ? "" : String(value));
  }
  element.append(...children.filter((child): child is Node | string => child !== null && child !== undefined && child !== false));
  return element;
}

/** A canvas as large as its place, sharp on every screen; drawn when it is seen and when its size changes. */
export class Picture {
  readonly canvas: HTMLCanvasElement;
  readonly context: CanvasRenderingContext2D;
  width = 0;
  /** Pixels of the screen in one of the page. */
  ratio = 1;
  private pending = false;
  private static known = new Set<WeakRef<Picture>>();
  /** Draws all that have a place, at once. */
  static drawAll() {
    for (const known of Picture.known) {
      const picture = known.deref();
      if (picture?.canvas.isConnected) picture.now(); else if (!picture) Picture.known.delete(known);
    }
  }
  constructor(public height: number, label: string, private draw: (context: CanvasRenderingContext2D, width: number, height: number) => void) {
    this.canvas = h("canvas", { role: "img", "aria-label": label, tabindex: 0 });
    this.context = this.canvas.getContext("2d")!;
    new ResizeObserver(() => this.redraw()).observe(this.canvas);
    Picture.known.add(new WeakRef(this));
  }
  /** Draws once before the next frame, however often it is asked for. */
  redraw() {
    if (this.pending) return;
    this.pending = true;
    requestAnimationFrame(() => { this.pending = false; this.now(); });
  }
  now() {
    const width = this.canvas.clientWidth, ratio = Math.min(2, devicePixelRatio || 1);
    if (!width) return;
    [this.width, this.ratio] = [width, ratio];
    this.canvas.style.height = this.height + "px";
    const [w, hgt] = [Math.round(width * ratio), Math.round(this.height * ratio)];
    if (this.canvas.width !== w || this.canvas.height !== hgt) { this.canvas.width = w; this.canvas.height = hgt; }
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.context.clearRect(0, 0, width, this.height);
    this.context.font = "11px system-ui, sans-serif";
    this.draw(this.context, width, this.height);
  }
}

/** Text that fits, its beginning kept. */
export function fitted(context: CanvasRenderingContext2D, text: string, width: number): string {
  if (width < 12) return "";
  if (context.measureText(text).width <= width) return text;
  let from = 0, to = text.length;
  while (from < to) {
    const middle = (from + to + 1) >> 1;
    if (context.measureText(text.slice(0, middle) + "\u2026").width <= width) from = middle; else to = middle - 1;
  }
  return from > 1 ? text.slice(0, from) + "\u2026" : "";
}

/** A file's name in one line: of a longer path its last parts, of a longer name its beginning and its end, where ranks and steps are. */
export function shortFile(path: string, most = 56): string {
  if (path.length <= most) return path;
  const parts = path.split("/");
  let shown = parts.pop()!;
  if (shown.length > most - 2) return `${parts.length ? "\u2026/" : ""}${shown.slice(0, most - 34)}\u2026${shown.slice(-30)}`;
  while (parts.length && shown.length + parts.at(-1)!.length + 3 <= most) shown = parts.pop() + "/" + shown;
  return "\u2026/" + shown;
}

/** `...end of a path` keeps a call site's line. */
export function shortSite(site: string): string {
  return site.replace(/\((?:[^():]*\/)([^\/():]+:\d+)\)/, "($1)");
}

/** Text of which what stands between backticks is code. */
export function prose(text: string): (Node | string)[] {
  return text.split(/`([^`]+)`/).map((part, i) => (i % 2 ? h("code", {}, part) : part));
}

/** Puts text on the clipboard, from a file as well. */
export function copied(text: string) {
  const area = h("textarea", {}, text);
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}
