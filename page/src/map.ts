// The address map: time from left to right, addresses of segments from bottom to top without the holes between them. Every block
// is a rectangle; what is thinner than a pixel is drawn as its density, and counted.
import { colours, theme } from "./colours";
import { h, Picture, shortSite } from "./dom";
import { axisLabels } from "./axis";
import { Busy } from "./busy";
import { shadeOf, shades } from "./blocks";
import { bytes, count, tickBytes, ticks, time } from "./format";
import { HOST, LEVEL, type Map2D, type Segment } from "./model";
import { packed, Raster } from "./raster";
import { grid } from "./tables";
import type { View } from "./view";

const LEFT = 74, RIGHT = 12, AXIS = 20, HEIGHT = 360;
/** In milliseconds: painting that takes less is done in every frame; the map is at rest after; it is painted again after. */
const QUICK = 8, REST = 90, LONGEST = 600;
/** So many blocks are laid out before anybody could see that the page waits. */
const FEW = 20_000;
/** So many blocks have an edge of their own at most. */
const MOST_STROKES = 400;

export class AddressMap {
  readonly element: HTMLElement;
  private picture: Picture;
  private note = h("p", { class: "readout", "aria-live": "polite" });
  private key_ = h("ul", { class: "legend" });
  private table = h("div");
  /** The part of all addresses that is seen, from 0 to 1. */
  private span: [number, number] = [0, 1];
  private drag: { x: number; y: number; span: [number, number]; window: [number, number]; moved: boolean } | null = null;
  private drawn = { whole: 0, thin: 0 };
  private raster = new Raster();
  /** What the raster has. */
  private exact: { key: string; window: [number, number]; span: [number, number]; strokes: [number, number, number, number][]; took: number; at: number } | null = null;
  private rest: ReturnType<typeof setTimeout> | null = null;
  private isAtRest = false;
  /** What the table and the colours beside the map were made for. */
  private made = "";
  /** The map that is being laid out. */
  private laying: Map2D | null = null;
  private sign = h("div");

  constructor(private view: View) {
    this.picture = new Picture(HEIGHT + AXIS, "Address map: blocks by time and address. The table of segments below has the same at the cursor. Up and down move through addresses, plus and minus zoom them.", (context, width) => this.draw(context, width));
    this.element = h("div", {}, this.key_, this.sign, this.picture.canvas, this.note, this.table);
    const canvas = this.picture.canvas;
    canvas.addEventListener("pointermove", (event) => (this.drag ? this.pan(event) : this.point(event.offsetX, event.offsetY)));
    canvas.addEventListener("pointerleave", () => this.say());
    canvas.addEventListener("pointerdown", (event) => { canvas.setPointerCapture(event.pointerId); this.drag = { x: event.offsetX, y: event.offsetY, span: this.span, window: view.window, moved: false }; });
    canvas.addEventListener("pointerup", (event) => {
      const isClick = this.drag && !this.drag.moved;
      this.drag = null;
      if (isClick && view.dev?.n) this.press(event.offsetX, event.offsetY);
    });
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey && !event.shiftKey) return;
      event.preventDefault();
      this.zoom(1 - event.offsetY / HEIGHT, Math.exp((event.deltaY || event.deltaX) / 300));
    }, { passive: false });
    canvas.addEventListener("keydown", (event) => {
      const size = this.span[1] - this.span[0];
      if (event.key === "ArrowUp") this.set(this.span[0] + size / 8, size);
      else if (event.key === "ArrowDown") this.set(this.span[0] - size / 8, size);
      else if (event.key === "+" || event.key === "=") this.zoom(0.5, 0.6);
      else if (event.key === "-") this.zoom(0.5, 1 / 0.6);
      else if (event.key === "Escape" && this.span[1] - this.span[0] < 1) this.set(0, 1);
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
  }
  private set(from: number, size: number) {
    size = Math.min(1, Math.max(1e-7, size));
    from = Math.min(1 - size, Math.max(0, from));
    this.span = [from, from + size];
    this.picture.redraw();
  }
  private zoom(at: number, factor: number) {
    const size = this.span[1] - this.span[0], wanted = Math.min(1, size * factor);
    this.set(this.span[0] + at * (size - wanted), wanted);
  }
  private pan(event: PointerEvent) {
    const drag = this.drag!, [dx, dy] = [event.offsetX - drag.x, event.offsetY - drag.y];
    if (Math.abs(dx) + Math.abs(dy) < 4 && !drag.moved) return;
    drag.moved = true;
    const wide = drag.window[1] - drag.window[0], high = drag.span[1] - drag.span[0];
    this.set(drag.span[0] + (dy / HEIGHT) * high, high);
    this.view.zoom(drag.window[0] - (dx / (this.picture.width - LEFT - RIGHT)) * wide, drag.window[1] - (dx / (this.picture.width - LEFT - RIGHT)) * wide);
    this.view.changed();
  }
  private position(x: number): number {
    const [from, to] = this.view.window;
    return from + ((x - LEFT) / (this.picture.width - LEFT - RIGHT)) * (to - from);
  }
  /** A time, as the axis counts. */
  private place(at: number): number {
    return this.view.dev!.place(this.view.axis, at);
  }
  /** Lays out many blocks with a sign of how far that is; then all of it is shown. */
  private async layOut(map: Map2D) {
    if (this.laying === map) return;
    this.laying = map;
    const busy = new Busy(this.sign), words = `Laying out ${count(map.blocks.n)} blocks`;
    for (const share of map.layOut(this.view.axis)) await busy.say(words, share);
    busy.done();
    if (this.laying === map) this.laying = null;
    this.view.changed();
  }
  private get isLaidOut(): boolean {
    const { view } = this, map = view.dev!.rectangles();
    return map.blocks.n <= FEW || map.isLaidOut(view.axis);
  }
  update() {
    this.picture.redraw();
    const { view } = this, device = view.dev;
    if (!device || !device.n) return;
    if (!this.isLaidOut) return void this.layOut(device.rectangles());
    const colour = theme(), made = [view.reading, view.cursor, view.by, view.search.text, view.picking, colour.free].join();
    if (made === this.made) return;
    this.made = made;
    const map = device.rectangles(), series = device.series(view.by), tints = colours(series.groups.map((group) => group.name));
    const entries: [string, string][] = series.groups.map((group, i): [string, string] => [group.name, tints[i]]).filter(([, tint], i) => series.groups[i].holders.some((holder) => view.trace.holders[holder].level !== LEVEL.cached) && tint);
    if (map.tiles.tiled) entries.push(["free, or blocks that are only counted", colour.free]);
    else entries.push(["free, stranded by a block", colour.free], ["free, whole segment (cache)", colour.empty]);
    if (map.grounds.pool.some((pool) => pool > 0)) entries.push(["segment of a private pool, free in it", colour.pool]);
    this.key_.replaceChildren(...entries.map(([name, tint]) => {
      const swatch = h("span", { class: "swatch" });
      swatch.style.background = tint;
      return h("li", {}, h("span", { title: name }, swatch, h("span", { class: "label" }, shortSite(name))));
    }));
    // JAX and others have no segments of PyTorch's.
    if (!map.grounds.kind.some((kind) => kind < 2) && device.head.device !== HOST) { this.table.replaceChildren(); return this.say(); }
    const at = device.times[view.cursor], segments = map.segments(at), live = segments.reduce((sum, it) => sum + it.live, 0), all = segments.reduce((sum, it) => sum + it.bytes, 0);
    const isWhole = map.isWhole(view.cursor), hasPools = view.trace.head.pools.length > 0, wholly = segments.filter((it) => !it.blocks.length && !it.pool).reduce((sum, it) => sum + it.bytes, 0), own = segments.filter((it) => it.pool).reduce((sum, it) => sum + it.bytes - it.live, 0), most = 100, isHost = device.head.device === HOST;
    this.table.replaceChildren(
      h("h3", {}, `PyTorch's segments at the cursor: ${bytes(all)} reserved, ` + (isWhole ? `${bytes(live)} in blocks, ${bytes(all - live - wholly - own)} stranded, ${bytes(wholly)} wholly free${own ? `, ${bytes(own)} free in private pools` : ""}` : `at least ${bytes(live)} in blocks`)),
      isWhole ? "" : h("p", { class: "warning" }, `${count(map.tiles.tiled)} smaller blocks of this trace are counted and not kept: at this instant, which part of a segment is free cannot be told, and who pins it only in part. At the peak (P) and at the end all are there, as far as there is room; gputrace serve has all of them.`),
      segments.length ? grid({
        name: "segments", caption: `Segments at the cursor, most free first; who ${isHost ? "holds" : "pins"} them`,
        columns: [["address", "address"], ["bytes", "size"], ["live", "in blocks"], ["free", "free"], ["blocks", "blocks"], ["pinned", isHost ? "held by" : "pinned by"], ...(hasPools ? [["pool", "pool"] as [string, string]] : [])],
        rows: segments.slice(0, most).map((it) => ["0x" + this.absolute(it.addr), { b: it.bytes }, { b: it.live }, isWhole ? { b: it.bytes - it.live } : null, { n: it.blocks.length }, this.pinned(it, isWhole), ...(hasPools ? [it.pool ? shortSite(view.trace.poolOf(it.pool)) : "default"] : [])]),
        onRow: (row) => this.pickSegment(segments[row]), isPicked: (row) => this.isPicked(segments[row]),
        leftOut: segments.length > most ? `${count(segments.length - most)} more` : null,
      }, view.search.pattern) : h("p", { class: "note" }, isHost ? "Snapshots of PyTorch say what lies in pinned memory that PyTorch keeps; there was none then." : "PyTorch had no segment then."));
    this.say();
  }
  private absolute(addr: number): string {
    return (BigInt(this.view.dev!.head.base) + BigInt(Math.round(addr))).toString(16);
  }
  /** The call sites that keep a segment: of few blocks all, of many those that hold most. */
  private pinned(segment: Segment, isWhole: boolean): string {
    const { view } = this, map = view.dev!.rectangles(), sites = new Map<string, number>();
    for (const block of segment.blocks) {
      const site = view.trace.holders[map.blocks.what[block]].site;
      sites.set(site, (sites.get(site) ?? 0) + map.blocks.bytes[block]);
    }
    const list = [...sites].sort((a, b) => b[1] - a[1]), shown = list.slice(0, 2).map(([site, held]) => `${shortSite(site)}: ${bytes(held)}`);
    if (list.length > 2) shown.push(`and ${count(list.length - 2)} more lines`);
    return list.length ? shown.join("; ") : segment.pool ? "nothing; what is free in a private pool is kept for it" : !isWhole ? "no block that is kept" : `nothing: ${view.dev!.head.device === HOST ? "torch.accelerator.empty_host_cache" : "empty_cache"} releases it`;
  }
  private draw(context: CanvasRenderingContext2D, width: number) {
    const { view } = this, device = view.dev, colour = theme();
    if (!device || !device.n || !this.isLaidOut) return;
    const map = device.rectangles(), { compact } = map, plot = width - LEFT - RIGHT;
    if (!compact.height) {
      context.fillStyle = colour.soft;
      return context.fillText("Nothing here has an address: the driver allocated no memory at one.", LEFT, 30);
    }
    const [from, to] = view.window, low = this.span[0] * compact.height, high = this.span[1] * compact.height;
    const x = (at: number) => LEFT + ((this.place(at) - from) / (to - from)) * plot;
    const y = (offset: number) => HEIGHT - ((offset - low) / (high - low)) * HEIGHT;
    const strokes = this.picture_(map, plot, [from, to], [low, high], colour.back);
    context.save();
    context.beginPath();
    context.rect(LEFT, 0, plot, HEIGHT);
    context.clip();
    context.imageSmoothingEnabled = false;
    const { raster, exact } = this, { ratio } = this.picture, there = exact!.window, high0 = exact!.span;
    // What was painted exactly is where it now belongs; while all of it is seen as it was painted, that is its own place.
    const [left, right] = [there[0], there[0] + ((there[1] - there[0]) * raster.width) / (plot * ratio)].map((at) => LEFT + ((at - from) / (to - from)) * plot);
    context.drawImage(raster.canvas!, left, y(high0[1]), right - left, y(high0[0]) - y(high0[1]));
    outlined(context, strokes, plot, colour.ink);
    for (const oom of view.trace.marks.get("out of memory")?.list ?? []) { context.fillStyle = colour.bad; context.fillRect(x(oom.from) - 0.75, 0, 1.5, HEIGHT); }
    context.fillStyle = colour.ink;
    const cursor = LEFT + ((view.cursorPlace - from) / (to - from)) * plot;
    context.fillRect(cursor - 0.75, 0, 1.5, HEIGHT);
    context.lineWidth = 1.5;
    context.restore();
    this.axes(context, width, low, high, y, colour);
    this.say();
  }
  /** Paints it where that is quick. Where it is not, what was painted last is moved and stretched while it is on the move, and painted
   * again when it comes to rest, or after a while. */
  private picture_(map: Map2D, plot: number, window: [number, number], span: [number, number], back: string): [number, number, number, number][] {
    const { view, exact } = this, now = performance.now();
    const key = [view.reading, view.axis, view.by, view.only, view.search.text, view.picking, plot, this.picture.ratio, back, map.blocks.n].join();
    const isThere = exact?.key === key && [0, 1].every((i) => exact.window[i] === window[i] && exact.span[i] === span[i]);
    if (isThere) return exact.strokes;
    if (this.rest) clearTimeout(this.rest);
    this.rest = null;
    if (exact?.key === key && exact.took > QUICK && now - exact.at < LONGEST && !this.isAtRest) {
      this.rest = setTimeout(() => { this.isAtRest = true; this.picture.redraw(); }, REST);
      return [];
    }
    this.isAtRest = false;
    const strokes = this.paint(map, plot, window, span);
    this.raster.painted();
    this.exact = { key, window, span, strokes, took: performance.now() - now, at: performance.now() };
    return strokes;
  }
  /** Draws what lies in a part of the axis and of the addresses; says where blocks are that the search lights up. */
  private paint(map: Map2D, plot: number, [from, to]: [number, number], [low, high]: [number, number]): [number, number, number, number][] {
    const { view } = this, device = view.dev!, colour = theme(), { ratio } = this.picture, raster = this.raster.begin(Math.ceil(plot * ratio), HEIGHT * ratio);
    const { grounds, blocks, tiles, lows, highs, groundLows, groundHighs, tileLows, tileHighs } = map, at = map.on(view.axis), sx = (plot * ratio) / (to - from), sy = (HEIGHT * ratio) / (high - low), bottom = HEIGHT * ratio;
    const [free, empty, own, other, soft, hatch, panel] = [colour.free, colour.empty, colour.pool, colour.line, colour.soft, colour.hatch, colour.panel].map(packed);
    for (let g = 0; g < grounds.n; g++) {
      if (at.grounds.to[g] < from || at.grounds.from[g] > to || groundHighs[g] < low || groundLows[g] > high) continue;
      const upper = bottom - (groundHighs[g] - low) * sy, lower = bottom - (groundLows[g] - low) * sy - 0.5;
      const tint = grounds.kind[g] > 1 ? other : grounds.pool[g] ? own : free;
      const [begin, end] = [(at.grounds.from[g] - from) * sx, (at.grounds.to[g] - from) * sx];
      if (grounds.kind[g] > 1) raster.fill(begin, upper, end, lower, tint); else raster.hatched(begin, end, upper, lower, tint, hatch, ratio);
      // What is empty of a private pool is not given back while anything may use the pool.
      if (grounds.pool[g]) continue;
      const spans = at.empty[g];
      for (let i = 0; i < spans.length; i += 2) {
        if (spans[i + 1] < from || spans[i] > to || (spans[i + 1] - spans[i]) * sx < 0.5) continue;
        raster.hatched((spans[i] - from) * sx, (spans[i + 1] - from) * sx, upper, lower, empty, hatch, ratio);
      }
    }
    for (let i = 0; i < tiles.n; i++) {
      const begin = at.tiles[tiles.column[i]], end = at.tiles[tiles.column[i] + 1];
      if (end < from || begin > to || tileHighs[i] < low || tileLows[i] > high) continue;
      raster.fill((begin - from) * sx, bottom - (tileHighs[i] - low) * sy, (end - from) * sx, bottom - (tileLows[i] - low) * sy, soft, Math.min(0.6, 0.1 + tiles.blocks[i] / 200));
    }
    const series = device.series(view.by), tints = colours(series.groups.map((group) => group.name)).map((tint) => shades(tint).map(packed)), { picked } = view, lit = view.litHolders;
    const chosen = view.only === null ? -1 : series.groups.findIndex((group) => group.name === view.only), strokes: [number, number, number, number][] = [];
    let whole = 0, thin = 0, nPicked = 0;
    for (let i = 0; i < blocks.n; i++) {
      const begin = at.blocks.from[i], end = at.blocks.to[i];
      if (end < from || begin > to || highs[i] < low || lows[i] > high) continue;
      const left = Math.max(-1, (begin - from) * sx), right = Math.min(raster.width + 1, (end - from) * sx), upper = bottom - (highs[i] - low) * sy, lower = bottom - (lows[i] - low) * sy;
      const holder = blocks.what[i], group = series.groupOf[holder], isLit = lit !== null && lit[holder], isPicked = picked !== null && picked.has(i);
      const weight = (lit && !isLit && !isPicked) || (picked && !isPicked && !isLit) || (chosen >= 0 && chosen !== group) ? 0.22 : 1, wide = right - left, tall = lower - upper, tint = tints[group]?.[shadeOf(i)] ?? soft;
      if ((wide < ratio || tall < ratio) && !isPicked) {
        thin++;
        raster.thin(left, upper, right, lower, tint, weight);
        continue;
      }
      whole++;
      // Paler by its own ground, so that stripes do not show through.
      if (weight < 1) raster.fill(left, upper, right, lower, panel, 0.75);
      raster.fill(left, upper, right - (wide > 5 * ratio ? ratio : 0), lower - (tall > 4 * ratio ? ratio : 0), tint, weight);
      if (isPicked) { nPicked++; strokes.push([left / ratio, upper / ratio, wide / ratio, tall / ratio]); }
    }
    raster.gathered();
    this.drawn = { whole, thin };
    // Of very many, an edge around each would cover them.
    if (picked && picked.ground >= 0) {
      const g = picked.ground;
      strokes.length = 0;
      strokes.push([((at.grounds.from[g] - from) * sx) / ratio, (bottom - (groundHighs[g] - low) * sy) / ratio, ((at.grounds.to[g] - at.grounds.from[g]) * sx) / ratio, ((groundHighs[g] - groundLows[g]) * sy) / ratio]);
    } else if (nPicked > MOST_STROKES) strokes.length = 0;
    return strokes;
  }
  private axes(context: CanvasRenderingContext2D, width: number, low: number, high: number, y: (offset: number) => number, colour: ReturnType<typeof theme>) {
    const { view } = this;
    context.fillStyle = colour.soft;
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (const at of ticks(low, high, 6, true)) context.fillText(tickBytes(at), LEFT - 8, Math.min(HEIGHT - 6, Math.max(6, y(at))));
    context.textAlign = "center";
    context.textBaseline = "top";
    const [from, to] = view.window;
    for (const [at, text] of axisLabels(view, width)) {
      const x = LEFT + ((at - from) / (to - from)) * (width - LEFT - RIGHT), half = context.measureText(text).width / 2 + 2;
      context.fillText(text, Math.max(half, Math.min(x, width - half)), HEIGHT + 5);
    }
  }
  /** A click: the cursor goes there, and the block or the segment that is there is selected. */
  private press(px: number, py: number) {
    const { view } = this, device = view.dev!, map = device.rectangles(), [at, addr] = this.placeOf(px, py), block = px < LEFT || py > HEIGHT ? -1 : map.find(addr, at), { grounds, blocks } = map;
    view.put(device.at0(view, this.position(px)), this.position(px));
    if (block >= 0) return view.select({ kind: "block", from: blocks.from[block], addr: blocks.addr[block] });
    const ground = this.groundAt(addr, at);
    view.select(ground < 0 ? null : { kind: "segment", from: grounds.from[ground], addr: grounds.addr[ground] });
  }
  /** The time and the address at a place of the picture. */
  private placeOf(px: number, py: number): [number, number] {
    const { view } = this, device = view.dev!, map = device.rectangles(), position = this.position(px);
    const offset = (this.span[0] + (1 - py / HEIGHT) * (this.span[1] - this.span[0])) * map.compact.height;
    return [view.axis === "time" ? position : device.times[Math.max(0, device.at0(view, position))], map.compact.address(offset)];
  }
  private groundAt(addr: number, at: number): number {
    const { grounds } = this.view.dev!.rectangles();
    for (let g = 0; g < grounds.n; g++) if (at >= grounds.from[g] && at < grounds.to[g] && addr >= grounds.addr[g] && addr < grounds.addr[g] + grounds.bytes[g]) return g;
    return -1;
  }
  /** Joined pages of an expandable segment are selected by the first of them. */
  private pickSegment(segment: Segment) {
    const { view } = this, g = this.groundAt(segment.addr, view.dev!.times[view.cursor]), { grounds } = view.dev!.rectangles();
    view.select(g < 0 || ((view.picked?.ground ?? -1) >= 0 && this.isPicked(segment)) ? null : { kind: "segment", from: grounds.from[g], addr: grounds.addr[g] });
  }
  private isPicked(segment: Segment): boolean {
    const { picked } = this.view;
    if (!picked) return false;
    if (picked.ground >= 0) { const addr = this.view.dev!.rectangles().grounds.addr[picked.ground]; return addr >= segment.addr && addr < segment.addr + segment.bytes; }
    return picked.block >= 0 && segment.blocks.includes(picked.block);
  }
  private point(px: number, py: number) {
    const { view } = this, device = view.dev;
    if (!device?.n || px < LEFT || py > HEIGHT) return this.say();
    const map = device.rectangles(), [at, addr] = this.placeOf(px, py), block = map.find(addr, at);
    if (block < 0) {
      const ground = map.grounds, inside = this.groundAt(addr, at);
      this.note.textContent = inside < 0 ? `0x${this.absolute(addr)} at ${time(Math.round(at))}: nothing was here` : `0x${this.absolute(addr)} at ${time(Math.round(at))}: ${map.tiles.tiled ? "free, or a block that is only counted," : "free,"} in a segment of ${bytes(ground.bytes[inside])} at 0x${this.absolute(ground.addr[inside])}${ground.pool[inside] ? " of " + shortSite(view.trace.poolOf(ground.pool[inside])) : ""}`;
      return;
    }
    const holder = view.trace.holders[map.blocks.what[block]], { from, to, addr: start, bytes: size } = map.blocks;
    this.note.textContent = `${bytes(size[block])} at 0x${this.absolute(start[block])}, from ${time(from[block])} for ${time(to[block] - from[block])}: ${holder.owner}, ${holder.role}, ${shortSite(holder.site)}`;
  }
  private say() {
    const { view } = this, device = view.dev;
    if (!device?.n) return;
    const map = device.rectangles(), { whole, thin } = this.drawn;
    const parts = [`${count(whole)} blocks drawn as they are`];
    if (thin) parts.push(`${count(thin)} thinner than a pixel drawn as their density`);
    if (map.tiles.tiled) parts.push(`${count(map.tiles.tiled)} of the smallest of the trace kept as ${count(map.tiles.n)} tiles`);
    if (device.head.n_unplaced) parts.push(`${count(device.head.n_unplaced)} objects of the driver have no address`);
    if (view.lit) { let n = 0; for (let i = 0; i < map.blocks.n; i++) if (view.lit[map.blocks.what[i]]) n++; parts.unshift(`${count(n)} blocks are lit up by the search`); }
    this.note.textContent = parts.join("; ") + `. ${bytes(map.compact.height)} of addresses in all.`;
  }
}

/** Strokes around blocks: what is inside keeps its colour, however small it is. */
function outlined(context: CanvasRenderingContext2D, blocks: [number, number, number, number][], plot: number, ink: string) {
  if (!blocks.length) return;
  const path = new Path2D(), outside = new Path2D();
  for (const [left, upper, wide, tall] of blocks) path.rect(LEFT + left, upper, Math.max(wide, 1), Math.max(tall, 1));
  outside.rect(LEFT, 0, plot, HEIGHT);
  outside.addPath(path);
  context.save();
  context.clip(outside, "evenodd");
  context.strokeStyle = ink;
  context.lineWidth = 2.5;
  context.stroke(path);
  context.restore();
}
