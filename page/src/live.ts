// What was held at a moment: a table by group, and a flame graph of its stacks.
import { colours, isLight, theme } from "./colours";
import { h, Picture, fitted } from "./dom";
import { boxes, tree, width as wide, type Box, type Node } from "./flame";
import { bytes, count, difference, share, time } from "./format";
import { GROUPINGS, GROUPING_TITLES } from "./model";
import { grid } from "./tables";
import { MOMENTS, type Moment, type View } from "./view";

const ROW = 18;
const MOMENT_TITLES: Record<Moment, string> = { cursor: "At the cursor", peak: "At the peak", end: "At the end", range: "Highest in the range", grew: "Grew in the range", base: "Base to cursor" };

export class Live {
  readonly element: HTMLElement;
  private picture: Picture;
  private heading = h("h3");
  private moments = h("div", { class: "choices", role: "group", "aria-label": "Which moment" });
  private table = h("div");
  private note = h("p", { class: "note", "aria-live": "polite" });
  private isInverted = false;
  private path: string[] = [];
  private list: Box[] = [];
  private hover: Box | null = null;
  private root: Node | null = null;
  private isDifference = false;
  private key = "";
  private asked = "";

  constructor(private view: View) {
    this.picture = new Picture(200, "Flame graph: what was held, by owner and by the lines that asked for it. The table before it has the same amounts.", (context, width) => this.draw(context, width));
    const invert = h("button", { type: "button", "aria-pressed": false, onclick: () => { this.isInverted = !this.isInverted; invert.setAttribute("aria-pressed", String(this.isInverted)); this.path = []; this.key = ""; this.update(); } }, "Innermost line first");
    this.element = h("div", {}, this.moments, this.heading, this.table, h("div", { class: "choices" }, invert), this.picture.canvas, this.note);
    const canvas = this.picture.canvas;
    canvas.addEventListener("pointermove", (event) => this.point(event.offsetX, event.offsetY));
    canvas.addEventListener("pointerleave", () => { this.hover = null; this.say(); });
    canvas.addEventListener("click", (event) => { this.point(event.offsetX, event.offsetY); if (this.hover) this.zoom(this.pathOf(this.hover)); });
    canvas.addEventListener("keydown", (event) => this.key_(event));
  }
  update() {
    const { view } = this, device = view.dev;
    const asked = [view.moment, view.by].join();
    if (asked !== this.asked) this.moments.replaceChildren(
      ...MOMENTS.map((moment) => h("button", { type: "button", "aria-pressed": view.moment === moment, onclick: () => { view.moment = moment; view.changed(); } }, MOMENT_TITLES[moment])),
      h("span", { class: "gap" }), "by ",
      ...GROUPINGS.map((by) => h("button", { type: "button", "aria-pressed": view.by === by, onclick: () => { view.by = by; view.only = null; view.changed(); } }, GROUPING_TITLES[by])),
    );
    this.asked = asked;
    if (!device || !device.n) {
      this.heading.textContent = "Nothing was held";
      return this.table.replaceChildren(h("p", {}, "No memory of a device was handed out."));
    }
    const { state, before, words } = view.shown();
    const key = [view.reading, state, before, view.by, view.only, view.search.text, this.isInverted, theme().unused].join();
    if (key === this.key) return;
    this.key = key;
    const now = device.held(state), earlier = before === null ? null : device.held(before);
    this.isDifference = earlier !== null;
    const series = device.series(view.by), tints = colours(series.groups.map((group) => group.name));
    const total = device.total[state], change = before === null ? 0 : total - device.total[before];
    this.heading.textContent = `${before === null ? bytes(total) : difference(change)} ${words}, ${time(device.times[state])}`;
    this.heading.dataset.value = String(before === null ? total : change);
    this.groups(now, earlier, total);
    if (view.only !== null) {
      const group = series.groups.findIndex((group) => group.name === view.only);
      for (let i = 0; i < now.bytes.length; i++) if (series.groupOf[i] !== group) { now.bytes[i] = 0; if (earlier) earlier.bytes[i] = 0; }
    }
    this.root = tree(view.trace, now.bytes, earlier?.bytes ?? null, series.groupOf, this.isInverted);
    this.tints = tints;
    this.layout();
    this.say();
  }
  private tints: string[] = [];
  /** One row for each group, however many: the picture joins the small ones, the table does not. */
  private groups(now: { bytes: Float64Array; objects: Float64Array }, earlier: { bytes: Float64Array } | null, total: number) {
    const { view } = this, device = view.dev!, series = device.series(view.by), tints = colours(series.groups.map((group) => group.name));
    const rows = new Map<string, { bytes: number; objects: number; before: number; group: number; isLit: boolean }>();
    for (const index of device.known) {
      const name = view.trace.holders[index][view.by];
      const row = rows.get(name) ?? { bytes: 0, objects: 0, before: 0, group: series.groupOf[index], isLit: false };
      row.bytes += now.bytes[index];
      row.objects += now.objects[index];
      row.before += earlier?.bytes[index] ?? 0;
      row.isLit ||= !!view.lit?.[index] && (now.bytes[index] > 0 || (earlier?.bytes[index] ?? 0) > 0);
      rows.set(name, row);
    }
    const list = [...rows].filter(([, row]) => row.bytes || row.before).sort((a, b) => (earlier ? Math.abs(b[1].bytes - b[1].before) - Math.abs(a[1].bytes - a[1].before) : b[1].bytes - a[1].bytes));
    const shown = view.lit ? list.filter(([, row]) => row.isLit) : list;
    const columns: [string, string][] = [["name", GROUPING_TITLES[view.by]], ["bytes", "Bytes"], ["share", "Share"], ["objects", "Objects"]];
    if (earlier) columns.splice(1, 3, ["before", "Before"], ["bytes", "After"], ["change", "Change"]);
    const most = 200;
    this.table.replaceChildren(grid({
      name: "live", caption: "What was held, by " + GROUPING_TITLES[view.by].toLowerCase(), columns,
      rows: shown.slice(0, most).map(([name, row]) => earlier ? [name, { b: row.before }, { b: row.bytes }, { d: row.bytes - row.before }] : [name, { b: row.bytes }, { s: total ? row.bytes / total : 0 }, { n: row.objects }]),
      swatch: (row) => tints[shown[row][1].group],
      onRow: (row) => { const group = series.groups[shown[row][1].group].name; view.only = view.only === group ? null : group; view.changed(); },
      leftOut: shown.length > most ? `${count(shown.length - most)} more` : null,
    }, null), view.lit && !shown.length ? h("p", { class: "note" }, "Nothing that was held then is lit up by the search.") : "", this.lines(now.bytes, earlier?.bytes ?? null));
  }
  /** What was held through each line that the search finds, wherever it stands in the stacks. */
  private lines(now: Float64Array, earlier: Float64Array | null): HTMLElement | string {
    const { trace, search: { pattern }, lit } = this.view, sums = new Map<string, { bytes: number; before: number }>();
    if (!pattern) return "";
    for (let index = 0; index < now.length; index++) {
      if (!lit![index] || (!now[index] && !earlier?.[index])) continue;
      for (const line of new Set(trace.stackOf(trace.holders[index]).filter((line) => pattern.test(line)))) {
        const sum = sums.get(line) ?? { bytes: 0, before: 0 };
        sums.set(line, { bytes: sum.bytes + now[index], before: sum.before + (earlier?.[index] ?? 0) });
      }
    }
    const list = [...sums].sort((a, b) => b[1].bytes - a[1].bytes), most = 50;
    return list.length ? grid({
      name: "lines", caption: "What was held through the lines that the search lights up", columns: [["line", "Lit up, anywhere in the stack"], ...(earlier ? [["before", "Before"] as [string, string]] : []), ["bytes", "Held through it"]],
      rows: list.slice(0, most).map(([line, sum]) => [line, ...(earlier ? [{ b: sum.before }] : []), { b: sum.bytes }]), leftOut: list.length > most ? `${count(list.length - most)} more` : null,
    }, null) : "";
  }
  private zoomed(): Node | null {
    let node = this.root;
    for (const name of this.path) node = node?.children.get(name) ?? null;
    return node ?? this.root;
  }
  private layout() {
    if (!this.root) return;
    if (this.zoomed() === this.root) this.path = [];
    const node = this.zoomed()!, { list, depth, left } = boxes(node, this.isDifference, 0.0007);
    this.list = list;
    this.left = left;
    this.picture.height = Math.max(60, (depth + 1) * ROW + 2);
    this.picture.redraw();
  }
  private left = 0;
  private draw(context: CanvasRenderingContext2D, width: number) {
    const colour = theme(), { view } = this;
    context.textBaseline = "middle";
    context.textAlign = "left";
    for (const box of this.list) {
      const x = box.from * width, w = Math.max((box.to - box.from) * width - 1, 0.5), y = box.depth * ROW;
      const isLit = view.lit ? box.node.holders.some((holder) => view.lit![holder]) && (view.search.pattern!.test(box.node.name) || !box.node.children.size) : false;
      let tint = box.node.group < 0 ? "#9aa7b0" : this.tints[box.node.group] ?? "#8d8d8d";
      if (this.isDifference && box.node.group >= 0) tint = box.node.bytes >= box.node.before ? "#d55e00" : "#0072b2";
      context.globalAlpha = view.lit && !isLit ? 0.25 : 1 - (box.depth % 2) * 0.14;
      context.fillStyle = tint;
      context.fillRect(x, y, w, ROW - 1);
      context.globalAlpha = 1;
      if (isLit || box === this.hover) {
        context.strokeStyle = colour.ink;
        context.strokeRect(x + 0.5, y + 0.5, Math.max(w - 1, 1), ROW - 2);
      }
      if (w > 24) {
        context.fillStyle = view.lit && !isLit ? colour.ink : isLight(tint) ? "#111" : "#fff";
        context.fillText(fitted(context, box.node.name, w - 8), x + 4, y + ROW / 2);
      }
    }
  }
  private point(x: number, y: number) {
    const at = x / this.picture.width, depth = Math.floor(y / ROW);
    this.hover = this.list.find((box) => box.depth === depth && at >= box.from && at < box.to) ?? null;
    this.say();
    this.picture.redraw();
  }
  private pathOf(box: Box): string[] {
    const path = [...this.path];
    for (let depth = 1; depth <= box.depth; depth++) {
      const around = this.list.find((it) => it.depth === depth && it.from <= box.from && it.to >= box.to - 1e-12);
      if (around) path.push(around.node.name);
    }
    return box.depth ? path : path.slice(0, -1);
  }
  private zoom(path: string[]) {
    this.path = path;
    this.hover = null;
    this.layout();
    this.say();
  }
  private key_(event: KeyboardEvent) {
    const at = this.hover ? this.list.indexOf(this.hover) : 0, box = this.list[at];
    if (!box) return;
    const same = (depth: number, by: number) => {
      const row = this.list.filter((it) => it.depth === depth).sort((a, b) => a.from - b.from);
      return row[Math.max(0, Math.min(row.length - 1, row.indexOf(box) + by))];
    };
    if (event.key === "ArrowRight") this.hover = same(box.depth, 1);
    else if (event.key === "ArrowLeft") this.hover = same(box.depth, -1);
    else if (event.key === "ArrowDown") this.hover = this.list.find((it) => it.depth === box.depth + 1 && it.from >= box.from && it.to <= box.to + 1e-12) ?? box;
    else if (event.key === "ArrowUp") this.hover = this.list.find((it) => it.depth === box.depth - 1 && it.from <= box.from && it.to >= box.to - 1e-12) ?? box;
    else if (event.key === "Enter") return this.zoom(this.pathOf(box));
    else if (event.key === "Escape") return this.zoom([]);
    else return;
    event.preventDefault();
    this.say();
    this.picture.redraw();
  }
  private say() {
    if (!this.root) return;
    const node = (this.hover ?? { node: this.zoomed()! }).node;
    const amount = this.isDifference ? `${difference(node.bytes - node.before)} (${bytes(node.before)} to ${bytes(node.bytes)})` : `${bytes(node.bytes)}, ${share(node.bytes / (this.root.bytes || 1))} of what is shown`;
    const left = this.left ? ` ${count(this.left)} narrower than a pixel are left out of the picture.` : "";
    const zoomed = this.path.length ? " Escape shows all again." : "";
    this.note.textContent = `${node === this.root ? "All" : node.name}: ${amount}.${left}${zoomed}${wide(this.root, this.isDifference) ? "" : " Nothing to draw."}`;
  }
}
