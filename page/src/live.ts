// What was held at a moment: a table by group, and a flame graph of its stacks.
import { colours, GREW, isLight, SHRANK, theme } from "./colours";
import { copied, h, Picture, fitted } from "./dom";
import { boxes, folded, ordered, sandwich, tree, width as wide, type Box, type Node } from "./flame";
import { bytes, count, difference, share, time } from "./format";
import { GROUPING_TITLES, isRest } from "./model";
import { grid } from "./tables";
import { MOMENTS, type Moment, type View } from "./view";

const ROW = 18;
/** What the flame graph is of: from the program inwards, from the innermost line outwards, around one function, in the order of births. */
const SHAPES = ["down", "up", "around", "order"] as const;
type Shape = (typeof SHAPES)[number];
const SHAPE_TITLES: Record<Shape, string> = { down: "Outermost line first", up: "Innermost line first", around: "Callers and callees", order: "In order of birth" };
const MOMENT_TITLES: Record<Moment, string> = { cursor: "At the cursor", peak: "At the peak", end: "At the end", range: "Highest in the range", grew: "Grew in the range", base: "Base to cursor" };

export class Live {
  readonly element: HTMLElement;
  private picture: Picture;
  private heading = h("h3");
  private moments = h("div", { class: "choices", role: "group", "aria-label": "Which moment" });
  private table = h("div");
  private note = h("p", { class: "note", "aria-live": "polite" });
  private shape: Shape = "down";
  private crumbs = h("div", { class: "choices crumbs", role: "group", "aria-label": "Opened frames" });
  private choices = h("div", { class: "choices", role: "group", "aria-label": "Flame graph" });
  private now: Float64Array | null = null;
  private before: Float64Array | null = null;
  private path: string[] = [];
  private list: Box[] = [];
  private hover: Box | null = null;
  private root: Node | null = null;
  private isDifference = false;
  private key = "";
  private asked = "";

  constructor(private view: View) {
    this.picture = new Picture(200, "Flame graph: what was held, by owner and by the lines that requested it. The table before it has the same amounts.", (context, width) => this.draw(context, width));
    this.element = h("div", {}, this.moments, this.heading, this.table, this.choices, this.crumbs, this.picture.canvas, this.note);
    const canvas = this.picture.canvas;
    canvas.addEventListener("pointermove", (event) => this.point(event.offsetX, event.offsetY));
    canvas.addEventListener("pointerleave", () => { this.hover = null; this.say(); });
    canvas.addEventListener("click", (event) => { this.point(event.offsetX, event.offsetY); if (this.hover) this.pick(this.hover); });
    canvas.addEventListener("dblclick", (event) => { this.point(event.offsetX, event.offsetY); if (this.hover) this.open(this.hover); });
    canvas.addEventListener("keydown", (event) => this.key_(event));
  }
  update() {
    const { view } = this, device = view.dev;
    const asked = view.moment;
    if (asked !== this.asked) this.moments.replaceChildren(
      ...MOMENTS.map((moment) => h("button", { type: "button", "aria-pressed": view.moment === moment, onclick: () => { view.moment = moment; view.changed(); } }, MOMENT_TITLES[moment])),
    );
    this.asked = asked;
    if (!device || !device.n) {
      this.heading.textContent = "Nothing was held";
      return this.table.replaceChildren(h("p", {}, "No memory of a device was allocated."));
    }
    const { state, before, words } = view.shown();
    const key = [view.reading, state, before, view.by, view.only, view.hidesUnused, view.search.text, view.picking, this.shape, theme().unused].join();
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
    // Where most of an allocator's memory is unused, the frames that hold the rest would be narrower than a pixel.
    if (view.hidesUnused) view.trace.holders.forEach((holder, i) => { if (isRest(holder.level)) { now.bytes[i] = 0; if (earlier) earlier.bytes[i] = 0; } });
    [this.now, this.before] = [now.bytes, earlier?.bytes ?? null];
    this.root = tree(view.trace, now.bytes, this.before, series.groupOf, this.shape === "up");
    this.choices.replaceChildren(
      h("span", { class: "set" }, ...SHAPES.map((shape) => h("button", { type: "button", "aria-pressed": this.shape === shape, onclick: () => { this.shape = shape; this.path = []; this.key = ""; this.update(); this.choices.querySelectorAll("button")[SHAPES.indexOf(shape)].focus(); } }, SHAPE_TITLES[shape]))),
      this.copy());
    this.tints = tints;
    this.layout();
    this.say();
  }
  /** A button that copies all stacks that are shown. */
  private copy(): HTMLElement {
    const button = h("button", { type: "button", title: "One stack per line with its bytes, as speedscope and flamegraph.pl read them", onclick: () => { copied(folded(this.view.trace, this.now!)); button.textContent = "Copied"; setTimeout(() => (button.textContent = "Copy stacks"), 1500); } }, "Copy stacks");
    return button;
  }
  /** The function that callers and callees are shown of: the last that was selected. */
  private get around(): string | null {
    const { pick, words } = this.view;
    if (pick?.kind === "frames" && pick.names.length > 1) this.named = pick.names[pick.names.length - 1];
    else if (pick?.kind === "line") this.named = this.view.trace.stackOf(this.view.trace.holders[this.view.picked!.holders.indexOf(true)] ?? this.view.trace.holders[0]).findLast((line) => line === pick.text || words?.test(line)) ?? this.named;
    else if (pick?.kind === "block" && this.view.picked!.block >= 0) this.named ??= this.view.trace.stackOf(this.view.trace.holders[this.view.dev!.rectangles().blocks.what[this.view.picked!.block]]).at(-1) ?? null;
    return this.named;
  }
  private named: string | null = null;
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
      row.isLit ||= !!view.litHolders?.[index] && (now.bytes[index] > 0 || (earlier?.bytes[index] ?? 0) > 0);
      rows.set(name, row);
    }
    const list = [...rows].filter(([, row]) => row.bytes || row.before).sort((a, b) => (earlier ? Math.abs(b[1].bytes - b[1].before) - Math.abs(a[1].bytes - a[1].before) : b[1].bytes - a[1].bytes));
    const shown = view.litHolders ? list.filter(([, row]) => row.isLit) : list;
    const columns: [string, string][] = [["name", GROUPING_TITLES[view.by]], ["bytes", "Bytes"], ["share", "Share"], ["objects", "Objects"]];
    if (earlier) columns.splice(1, 3, ["before", "Before"], ["bytes", "After"], ["change", "Change"]);
    const most = 200;
    this.table.replaceChildren(grid({
      name: "live", caption: "What was held, by " + GROUPING_TITLES[view.by].toLowerCase(), columns,
      rows: shown.slice(0, most).map(([name, row]) => earlier ? [name, { b: row.before }, { b: row.bytes }, { d: row.bytes - row.before }] : [name, { b: row.bytes }, { s: total ? row.bytes / total : 0 }, { n: row.objects }]),
      swatch: (row) => tints[shown[row][1].group],
      onRow: (row) => view.select(this.isPicked(shown[row][0]) ? null : { kind: "group", by: view.by, name: shown[row][0] }),
      isPicked: (row) => this.isPicked(shown[row][0]),
      leftOut: shown.length > most ? `${count(shown.length - most)} more` : null,
    }, null), view.litHolders && !shown.length ? h("p", { class: "note" }, "Nothing that was held then is lit up by the search.") : "", this.lines(now.bytes, earlier?.bytes ?? null));
  }
  /** Whether all that a row stands for is selected. */
  private isPicked(name: string): boolean {
    const { view } = this, { picked } = view;
    if (!picked) return false;
    const of = view.dev!.known.filter((index) => view.trace.holders[index][view.by] === name);
    return (picked.isWhole || picked.block >= 0) && of.some((index) => picked.holders[index]) && (picked.block >= 0 || of.every((index) => picked.holders[index]));
  }
  private pick(box: Box) {
    const names = this.pathOf(box);
    if (this.shape === "around") this.view.select(box.node.bytes || box.node.before ? { kind: "line", text: box.node.name } : null);
    else this.view.select(names.length ? { kind: "frames", names, isInner: this.shape === "up" } : null);
  }
  /** What was held through each line that the search finds, wherever it stands in the stacks. */
  private lines(now: Float64Array, earlier: Float64Array | null): HTMLElement | string {
    const { trace, words: pattern, lit: found, picked } = this.view, lit = found ?? picked?.holders, sums = new Map<string, { bytes: number; before: number }>();
    if (!pattern || !lit) return "";
    for (let index = 0; index < now.length; index++) {
      if (!lit[index] || (!now[index] && !earlier?.[index])) continue;
      for (const line of new Set(trace.stackOf(trace.holders[index]).filter((line) => pattern.test(line)))) {
        const sum = sums.get(line) ?? { bytes: 0, before: 0 };
        sums.set(line, { bytes: sum.bytes + now[index], before: sum.before + (earlier?.[index] ?? 0) });
      }
    }
    const list = [...sums].sort((a, b) => b[1].bytes - a[1].bytes), most = 50;
    return list.length ? grid({
      name: "lines", caption: "What was held through the lines that are selected or searched for", columns: [["line", "Selected or searched for, anywhere in the stack"], ...(earlier ? [["before", "Before"] as [string, string]] : []), ["bytes", "Held through it"]],
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
    [this.list, this.left] = this.laid();
    this.picture.height = Math.max(60, (this.list.reduce((most, box) => Math.max(most, box.depth), 0) + 1) * ROW + 2);
    this.picture.redraw();
    const link = (words: string, path: string[]) => h("button", { type: "button", class: "plain link", onclick: () => this.zoom(path) }, words);
    this.crumbs.hidden = !this.path.length;
    this.crumbs.replaceChildren(...(this.path.length ? ["all", ...this.path].flatMap((name, depth) => [depth ? " \u203a " : "", depth === this.path.length ? h("span", {}, name) : link(name, this.path.slice(0, depth))]) : []));
  }
  /** The boxes of the shape that was chosen, and how many are narrower than a pixel. */
  private laid(): [Box[], number] {
    const { view, now, before } = this, groups = view.dev!.series(view.by).groupOf, least = 0.0007;
    if (this.shape === "around") {
      const name = this.around;
      if (name === null) return [[], 0];
      const { callers, callees } = sandwich(view.trace, now!, before, groups, name), above = boxes(callers, this.isDifference, least), below = boxes(callees, this.isDifference, least);
      return [[...above.list.filter((box) => box.depth > 0).map((box) => ({ ...box, depth: above.depth - box.depth })), ...below.list.map((box) => ({ ...box, depth: above.depth + box.depth }))], above.left + below.left];
    }
    if (this.shape === "order") {
      const device = view.dev!, { state } = view.shown(), at = device.times[state], { blocks } = device.rectangles(), left = Float64Array.from(now!), held: [number, number][] = [];
      for (let i = 0; i < blocks.n && blocks.from[i] <= at; i++) {
        const bytes = Math.min(blocks.bytes[i], left[blocks.what[i]]);
        if (blocks.to[i] <= at || bytes <= 0) continue;
        left[blocks.what[i]] -= bytes;
        held.push([blocks.what[i], bytes]);
      }
      // What has no block of its own comes last.
      left.forEach((bytes, index) => { if (bytes > 0) held.push([index, bytes]); });
      const list = ordered(view.trace, held, groups), wide = list.filter((box) => box.to - box.from >= least);
      return [wide, list.length - wide.length];
    }
    const { list, left } = boxes(this.zoomed()!, this.isDifference, least);
    return [list, left];
  }
  /** Opens a box: it is as wide as the picture, or what callers and callees are shown of. */
  private open(box: Box) {
    if (this.shape === "down" || this.shape === "up") return this.zoom(this.pathOf(box));
    if (this.shape === "around") { this.named = box.node.name; this.view.select({ kind: "line", text: box.node.name }); }
  }
  private left = 0;
  private draw(context: CanvasRenderingContext2D, width: number) {
    const colour = theme(), { view } = this, lit = view.litHolders;
    context.textBaseline = "middle";
    context.textAlign = "left";
    for (const box of this.list) {
      const x = box.from * width, w = Math.max((box.to - box.from) * width - 1, 0.5), y = box.depth * ROW;
      const isLit = lit ? box.node.holders.some((holder) => lit[holder]) && (view.search.pattern!.test(box.node.name) || !box.node.children.size) : false;
      let tint = box.node.group < 0 ? "#9aa7b0" : this.tints[box.node.group] ?? "#8d8d8d";
      if (this.isDifference && box.depth > 0) tint = box.node.bytes >= box.node.before ? GREW : SHRANK;
      const { picked } = view, isPicked = picked !== null && box.node !== this.root && box.node.name !== "all" && (picked.isWhole ? box.node.holders.every((holder) => picked.holders[holder]) : box.node.holders.some((holder) => picked.holders[holder]));
      context.globalAlpha = (lit && !isLit) || (picked && !isPicked) ? 0.3 : 1 - (box.depth % 2) * 0.14;
      context.fillStyle = tint;
      context.fillRect(x, y, w, ROW - 1);
      context.globalAlpha = 1;
      if (isLit || isPicked || box === this.hover) {
        context.strokeStyle = colour.ink;
        context.lineWidth = isPicked ? 1.5 : 1;
        context.strokeRect(x + 0.5, y + 0.5, Math.max(w - 1, 1), ROW - 2);
      }
      if (w > 24) {
        context.fillStyle = (lit && !isLit) || (picked && !isPicked) ? colour.ink : isLight(tint) ? "#111" : "#fff";
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
    else if (event.key === "Enter") this.open(box);
    else if (event.key === " ") this.pick(box);
    else if (event.key === "Escape" && this.path.length) { event.stopPropagation(); this.zoom([]); }
    else return;
    event.preventDefault();
    this.say();
    this.picture.redraw();
  }
  private say() {
    if (!this.root) return;
    if (this.shape === "around" && !this.list.length) { this.note.textContent = "Select a frame, a line or a block: its callers are shown above it, what it calls below."; return; }
    const node = (this.hover ?? { node: this.zoomed()! }).node;
    const amount = this.isDifference ? `${difference(node.bytes - node.before)} (${bytes(node.before)} to ${bytes(node.bytes)})` : `${bytes(node.bytes)}, ${share(node.bytes / (this.root.bytes || 1))} of what is shown`;
    const left = this.left ? ` ${count(this.left)} narrower than a pixel are left out of the picture.` : "";
    const zoomed = this.path.length ? " Escape shows all again." : " Click or Space selects, double click or Enter opens.";
    this.note.textContent = `${node === this.root ? "All" : node.name}: ${amount}.${left}${zoomed}${wide(this.root, this.isDifference) ? "" : " Nothing to draw."}`;
  }
}
