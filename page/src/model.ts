// A trace in the memory of the page: holders, states, and what follows from them.
import type { ChapterHead, Data, DeviceHead, RectangleColumns } from "./data";
import { Pyramid, upTo } from "./pyramid";

export const CACHED = "(reserved by PyTorch, used by nobody)";
export const ARENA = "(held by JAX's allocator, in no buffer: temporaries, free)";
export const NO_STACK = "(no stack recorded)";
/** Most groups that have a colour of their own. */
export const MOST_GROUPS = 10;
/** The same of layers, whose colours only have to tell neighbours apart. */
const MOST_LAYERS = 128;

export const GROUPINGS = ["owner", "role", "site", "pool", "stream", "layer"] as const;
export type Grouping = (typeof GROUPINGS)[number];
export const GROUPING_TITLES: Record<Grouping, string> = { owner: "Owner", role: "Role", site: "Call site", pool: "Pool", stream: "Stream", layer: "Layer" };
export const NO_LAYER = "in no layer";
/** What an axis counts: nanoseconds, changes of memory, or steps of training of equal width. */
export const AXES = ["time", "change", "step"] as const;
export type Axis = (typeof AXES)[number];

/** What a holder is, as replay/page/src numbers it. */
export const LEVEL = { driver: 0, block: 1, cached: 2, buffer: 3, arena: 4 };
/** What is left of an allocator's memory, and has no place in the program. */
export const isRest = (level: number) => level === LEVEL.cached || level === LEVEL.arena;

/** What pinned memory of the host is numbered as, among devices. */
export const HOST = -2;

export interface Holder { owner: string; role: string; site: string; pool: string; stream: string; layer: string; level: number; stack: number; text: string }
/** `stack`: one more than its index, 0 where there is none. */
export interface Mark { kind: string; from: number; to: number | null; text: string; device: number; bytes: number; stack: number }
export interface Held { bytes: Float64Array; objects: Float64Array }
export interface Group { name: string; holders: number[]; peak: number }

export class Chapter {
  readonly holders: Holder[] = [];
  readonly devices: Device[];
  readonly marks: Map<string, { list: Mark[]; n: number }> = new Map();
  private stackStart: number[] = [];
  private lines: Float64Array;
  constructor(readonly head: ChapterHead, readonly data: Data, readonly index: number) {
    const lengths = data.column(head.stack_lengths);
    this.lines = data.column(head.stack_lines);
    let at = 0;
    for (const length of lengths) { this.stackStart.push(at); at += length; }
    this.stackStart.push(at);
    this.readHolders();
    this.devices = head.devices.map((device) => new Device(this, device));
    if (head.findings.length) this.marks.set("finding", { list: head.findings.map(([from, text]) => ({ kind: "finding", from, to: from, text, device: -1, bytes: 0, stack: 0 })), n: head.findings.length });
    for (const marks of head.marks) {
      const [from, time, device, bytes, stack, text] = [marks.from, marks.time, marks.device, marks.bytes, marks.stack, marks.text].map((id) => data.column(id));
      const list = Array.from(from, (start, i) => ({
        kind: marks.kind, from: start, to: time[i] ? start + time[i] - 1 : null, text: marks.texts[text[i]], device: device[i], bytes: bytes[i], stack: stack[i],
      }));
      this.marks.set(marks.kind, { list, n: marks.n });
    }
  }
  private readHolders() {
    const { head, data } = this, h = head.holders;
    const [level, owner, site, stack, stream, role, own, kind, layers] = [h.level, h.owner, h.site, h.stack, h.stream, h.role, h.private, h.kind, h.layer].map((id) => data.column(id));
    for (let i = 0; i < level.length; i++) {
      const isCached = level[i] === LEVEL.cached, isArena = level[i] === LEVEL.arena, isBlock = level[i] === LEVEL.block;
      const known = head.owners[owner[i] - 1] ?? "unknown";
      const name = isCached ? "PyTorch, unused" : isBlock ? h.torch : isArena ? known + ", in no buffer" : known;
      const where = isCached ? CACHED : isArena ? ARENA : site[i] ? head.sites[site[i] - 1] : NO_STACK;
      const pool = own[i] ? this.poolOf(own[i]) + (isCached ? ", unused" : "") : h.kinds[kind[i]] + (stream[i] ? `, stream ${h.streams[stream[i] - 1]}` : "");
      const what = isCached ? "PyTorch, unused" : role[i] ? head.roles[role[i] - 1][0] : isBlock ? "no role" : name;
      const queue = isCached || isArena ? what : stream[i] ? `stream ${h.streams[stream[i] - 1]}` : "no stream recorded";
      const layer = layers[i] ? head.layers[layers[i] - 1] : isCached || isArena ? what : NO_LAYER;
      this.holders.push({ owner: name, role: what, site: where, pool, stream: queue, layer, level: level[i], stack: stack[i], text: "" });
    }
  }
  /** What its memory can be grouped by. */
  get groupings(): Grouping[] { return GROUPINGS.filter((by) => by !== "layer" || this.head.layers.length > 0); }
  /** Steps of training, as far as there is more than one. */
  get steps(): Mark[] {
    const list = this.marks.get("step")?.list ?? [];
    return list.length > 1 ? list : [];
  }
  /** Where a time lies on the axis of steps: each step is as wide as the others, and there is nothing between them. */
  stepAt(time: number): number {
    const { steps } = this, at = upTo((this.stepStarts ??= Float64Array.from(steps, (it) => it.from)), time) - 1;
    if (at < 0) return steps[0]?.from ? time / steps[0].from - 1 : 0;
    const step = steps[at], next = steps[at + 1]?.from ?? this.head.duration_ns, end = step.to ?? next;
    if (time <= end) return at + (end > step.from ? (time - step.from) / (end - step.from) : 0);
    return at + 1 + (at + 1 < steps.length ? 0 : Math.min(1, (time - end) / Math.max(1, this.head.duration_ns - end)));
  }
  private stepStarts: Float64Array | null = null;
  /** A private pool of PyTorch's in words, by its number from 1. */
  poolOf(number: number): string {
    const { id, what, places } = this.head.pools[number - 1];
    const at = places.length ? `, ${what === "MemPool" ? "opened" : "captured"} at ${places.join("; ")}` : "";
    return `pool ${id}: ${what}${at}`;
  }
  /** The lines of a holder's stack, outermost first, never none. */
  stackOf(holder: Holder): string[] {
    if (holder.level === LEVEL.cached) return [CACHED];
    if (holder.level === LEVEL.arena) return [ARENA];
    return this.linesOf(holder.stack);
  }
  private linesOf(stack: number): string[] {
    const lines = [];
    for (let at = this.stackStart[stack]; at < this.stackStart[stack + 1]; at++) lines.push(this.frame(this.lines[at]));
    return lines.length ? lines : [NO_STACK];
  }
  /** The same of a mark. */
  stackOfMark(mark: Mark): string[] { return mark.stack ? this.linesOf(mark.stack - 1) : [NO_STACK]; }
  private frame(index: number): string {
    const [name, file, line] = this.head.frames[index], base = file.slice(file.lastIndexOf("/") + 1);
    return file === "" ? name : line ? `${name} (${base}:${line})` : `${name} (${base})`;
  }
  /** All words of a holder, for searches. */
  textOf(index: number): string {
    const holder = this.holders[index];
    return (holder.text ||= [holder.owner, holder.role, holder.site, holder.pool, ...(this.head.layers.length ? [holder.layer] : []), ...this.stackOf(holder)].join("\n"));
  }
}

export class Device {
  readonly times: Float64Array;
  readonly changes: Float64Array;
  readonly total: Float64Array;
  /** The same without what is left of PyTorch's and JAX's memory. */
  readonly used: Float64Array;
  readonly highest: Pyramid;
  readonly lowest: Pyramid;
  readonly fullest: Pyramid;
  readonly peak: number;
  readonly rowEnds: Float64Array;
  readonly rowHolder: Float64Array;
  readonly rowBytes: Float64Array;
  readonly rowObjects: Float64Array;
  /** Holders that it has. */
  readonly known: number[];
  private made = new Map<Grouping, Series>();
  private map: Map2D | null = null;
  constructor(readonly chapter: Chapter, readonly head: DeviceHead) {
    const data = chapter.data;
    [this.times, this.changes, this.rowHolder, this.rowBytes, this.rowObjects] =
      [head.state_time, head.state_change, head.row_holder, head.row_bytes, head.row_objects].map((id) => data.column(id));
    const counts = data.column(head.state_rows), n = this.times.length;
    this.rowEnds = new Float64Array(n);
    this.total = new Float64Array(n);
    this.used = new Float64Array(n);
    let row = 0, held = 0, unused = 0;
    for (let state = 0; state < n; state++) {
      const end = row + counts[state];
      for (; row < end; row++) {
        held += this.rowBytes[row];
        if (isRest(chapter.holders[this.rowHolder[row]].level)) unused += this.rowBytes[row];
      }
      this.rowEnds[state] = end;
      this.total[state] = held;
      this.used[state] = held - unused;
    }
    this.highest = new Pyramid(this.total, 1, this.used);
    this.lowest = new Pyramid(this.total, -1, this.used);
    this.fullest = new Pyramid(this.used, 1);
    this.peak = Math.max(0, this.highest.best(0, n));
    this.known = [...new Set(this.rowHolder)];
  }
  get n(): number { return this.times.length; }
  /** Where each state lies on an axis. */
  positionsOn(axis: Axis): Float64Array {
    if (axis !== "step") return axis === "time" ? this.times : this.changes;
    return (this.steps ??= this.times.map((time) => this.chapter.stepAt(time)));
  }
  /** Where a time lies on an axis. */
  place(axis: Axis, time: number): number {
    return axis === "time" ? time : axis === "step" ? this.chapter.stepAt(time) : this.changes[Math.max(0, this.at(time))];
  }
  private steps: Float64Array | null = null;
  /** What each holder held in a state. */
  held(state: number): Held {
    const n = this.chapter.holders.length, held = { bytes: new Float64Array(n), objects: new Float64Array(n) };
    const end = state < 0 ? 0 : this.rowEnds[state];
    for (let row = 0; row < end; row++) {
      held.bytes[this.rowHolder[row]] += this.rowBytes[row];
      held.objects[this.rowHolder[row]] += this.rowObjects[row];
    }
    return held;
  }
  /** The state at a place of the axis. */
  at0(view: { positions: Float64Array }, position: number): number { return upTo(view.positions, position) - 1; }
  /** The state at a time: the last that is not later; -1 before the first. */
  at(time: number): number { return upTo(this.times, time) - 1; }
  series(by: Grouping): Series {
    let series = this.made.get(by);
    if (!series) this.made.set(by, (series = new Series(this, by)));
    return series;
  }
  /** The bytes of some holders over all states. */
  sum(of: (holder: number) => boolean): Float64Array {
    const sums = new Float64Array(this.n), wanted = this.chapter.holders.map((_, i) => of(i));
    let row = 0, held = 0;
    for (let state = 0; state < this.n; state++) {
      for (; row < this.rowEnds[state]; row++) if (wanted[this.rowHolder[row]]) held += this.rowBytes[row];
      sums[state] = held;
    }
    return sums;
  }
  rectangles(): Map2D { return (this.map ??= new Map2D(this)); }
}

/** The states of a device by group: the largest groups, and the others together. */
export class Series {
  readonly groups: Group[] = [];
  /** Group of each holder; -1 of none that this device has. */
  readonly groupOf: Int32Array;
  /** By group, then by state. */
  readonly bytes: Float64Array[] = [];
  constructor(readonly device: Device, readonly by: Grouping) {
    const { holders } = device.chapter, names = new Map<string, number[]>();
    for (const index of device.known) {
      const name = holders[index][by], list = names.get(name);
      if (list) list.push(index); else names.set(name, [index]);
    }
    const all = [...names].map(([name, list]) => ({ name, holders: list, peak: 0 }));
    this.groupOf = new Int32Array(holders.length).fill(-1);
    all.forEach((group, i) => group.holders.forEach((holder) => (this.groupOf[holder] = i)));
    const held = new Float64Array(all.length);
    for (let row = 0; row < device.rowHolder.length; row++) {
      const group = this.groupOf[device.rowHolder[row]];
      held[group] += device.rowBytes[row];
      all[group].peak = Math.max(all[group].peak, held[group]);
    }
    const most = by === "layer" ? MOST_LAYERS : MOST_GROUPS, { layers } = device.chapter.head;
    all.sort((a, b) => b.peak - a.peak || (a.name < b.name ? -1 : 1));
    // Layers lie in their order, below what is in none.
    const place = new Map(layers.map((name, number) => [name, number]));
    if (by === "layer") all.sort((a, b) => (place.get(a.name) ?? layers.length) - (place.get(b.name) ?? layers.length));
    this.groups = all.slice(0, most);
    if (all.length > most) {
      const rest = all.slice(most);
      this.groups.push({ name: `${rest.length} others`, holders: rest.flatMap((group) => group.holders), peak: 0 });
    }
    // What is unused lies on top.
    const isUnused = (group: Group) => group.holders.every((holder) => isRest(holders[holder].level));
    this.groups.sort((a, b) => Number(isUnused(a)) - Number(isUnused(b)));
    this.groups.forEach((group, i) => group.holders.forEach((holder) => (this.groupOf[holder] = i)));
    this.bytes = this.groups.map(() => new Float64Array(device.n));
    const now = new Float64Array(this.groups.length);
    let row = 0;
    for (let state = 0; state < device.n; state++) {
      for (; row < device.rowEnds[state]; row++) now[this.groupOf[device.rowHolder[row]]] += device.rowBytes[row];
      for (let group = 0; group < now.length; group++) this.bytes[group][state] = now[group];
    }
    this.groups.forEach((group, i) => { group.peak = this.bytes[i].reduce((a, b) => Math.max(a, b), 0); });
  }
}

/** `spare`: bytes that were not asked for. */
export interface Rectangles { n: number; addr: Float64Array; bytes: Float64Array; spare: Float64Array; from: Float64Array; to: Float64Array; what: Float64Array }
/** What blocks lie in: 0 a segment of PyTorch, 1 pages of one, 2 and 3 the same of others; and the private pool that it is of, from 1. */
export interface Grounds extends Rectangles { kind: Float64Array; pool: Float64Array }
export interface Tiles { n: number; bytes: number; columns: number; addr: Float64Array; column: Float64Array; blocks: Float64Array; tiled: number }

/** Addresses without the holes between segments: ranges that anything ever lay in, one on the other. */
export class Compact {
  readonly starts: number[] = [];
  readonly ends: number[] = [];
  readonly offsets: number[] = [];
  readonly height: number;
  constructor(ranges: [number, number][]) {
    ranges.sort((a, b) => a[0] - b[0]);
    for (const [start, end] of ranges) {
      const last = this.ends.length - 1;
      if (last >= 0 && start <= this.ends[last]) this.ends[last] = Math.max(this.ends[last], end);
      else { this.starts.push(start); this.ends.push(end); }
    }
    let at = 0;
    for (let i = 0; i < this.starts.length; i++) { this.offsets.push(at); at += this.ends[i] - this.starts[i]; }
    this.height = at;
  }
  /** Whether all of a range is in what anything lay in. */
  has(start: number, end: number): boolean {
    const i = upTo(this.starts, start) - 1;
    return i >= 0 && end <= this.ends[i];
  }
  /** Where an address lies; addresses between ranges lie where the next begins. */
  of(addr: number): number {
    const i = upTo(this.starts, addr) - 1;
    return i < 0 ? 0 : this.offsets[i] + Math.min(addr, this.ends[i]) - this.starts[i];
  }
  /** The address that lies there. */
  address(at: number): number {
    const i = Math.max(0, upTo(this.offsets, at) - 1);
    return i < this.starts.length ? this.starts[i] + at - this.offsets[i] : 0;
  }
}

export class Map2D {
  readonly blocks: Rectangles;
  readonly grounds: Grounds;
  readonly tiles: Tiles;
  private positions = new Map<Axis, Positions>();
  constructor(readonly device: Device) {
    const { data, head: { duration_ns: end } } = device.chapter;
    const read = (head: RectangleColumns): Rectangles => {
      const [addr, bytes, spare, from, time, what] = [head.addr, head.bytes, head.spare, head.from, head.time, head.what].map((id) => data.column(id));
      const to = Float64Array.from(time, (time, i) => (time ? from[i] + time - 1 : Math.max(end, from[i])));
      return { n: addr.length, addr, bytes, spare, from, to, what };
    };
    this.blocks = read(device.head.blocks);
    const grounds = read(device.head.grounds);
    this.grounds = { ...grounds, kind: grounds.what.map((what) => what % 4), pool: grounds.what.map((what) => Math.floor(what / 4)) };
    const tiles = device.head.blocks, [addr, column, blocks] = [tiles.tile_addr, tiles.tile_column, tiles.tile_blocks].map((id) => data.column(id));
    this.tiles = { n: addr.length, bytes: tiles.tile_bytes, columns: tiles.tile_columns, addr, column, blocks, tiled: tiles.n_tiled };
  }
  /** What only the map needs is made when it is first drawn: over time, addresses do not matter. */
  private placed: Placed | null = null;
  private get places(): Placed {
    for (const _ of this.placing());
    return this.placed!;
  }
  /** Whether all that the map needs on an axis is there. */
  isLaidOut(axis: Axis): boolean { return this.placed !== null && this.positions.has(axis); }
  /** Makes what the map needs on an axis, in parts between which others can compute; gives the share that is done. */
  *layOut(axis: Axis): Generator<number> {
    for (const share of this.placing()) yield share / 2;
    for (const share of this.positioning(axis)) yield 0.5 + share / 2;
  }
  private *placing(): Generator<number> {
    if (this.placed) return;
    const { grounds, blocks, tiles } = this, ranges = Array.from(grounds.addr, (addr, g): [number, number] => [addr, addr + grounds.bytes[g]]), inGrounds = new Compact(ranges);
    // Nearly all blocks lie in a segment, and add nothing.
    for (let i = 0; i < blocks.n; i++) if (!inGrounds.has(blocks.addr[i], blocks.addr[i] + blocks.bytes[i])) ranges.push([blocks.addr[i], blocks.addr[i] + blocks.bytes[i]]);
    yield 0.2;
    const compact = new Compact(ranges), low = (all: Rectangles) => all.addr.map((addr) => compact.of(addr)), high = (all: Rectangles) => all.addr.map((addr, i) => compact.of(addr + all.bytes[i] - 1) + 1);
    const lows = low(blocks);
    yield 0.4;
    const highs = high(blocks), [groundLows, groundHighs] = [low(grounds), high(grounds)];
    yield 0.6;
    const tileLows = tiles.addr.map((addr) => compact.of(addr)), tileHighs = tiles.addr.map((addr) => compact.of(addr + tiles.bytes - 1) + 1);
    yield 0.7;
    this.placed = { compact, lows, highs, groundLows, groundHighs, tileLows, tileHighs, empty: this.emptiness() };
  }
  get compact(): Compact { return this.places.compact; }
  /** Where each block begins and ends, without the holes between addresses; then segments and tiles. */
  get lows(): Float64Array { return this.places.lows; }
  get highs(): Float64Array { return this.places.highs; }
  get groundLows(): Float64Array { return this.places.groundLows; }
  get groundHighs(): Float64Array { return this.places.groundHighs; }
  get tileLows(): Float64Array { return this.places.tileLows; }
  get tileHighs(): Float64Array { return this.places.tileHighs; }
  /** For each ground, when no block was in it: from, to, from, to... */
  get empty(): number[][] { return this.places.empty; }
  /** Where all of it lies on an axis. */
  on(axis: Axis): Positions {
    for (const _ of this.positioning(axis));
    return this.positions.get(axis)!;
  }
  private *positioning(axis: Axis): Generator<number> {
    if (this.positions.has(axis)) return;
    const { blocks, grounds, device } = this, place = (time: number) => device.place(axis, time), from = blocks.from.map(place);
    yield 0.4;
    const to = blocks.to.map(place);
    yield 0.8;
    const wide = device.chapter.head.duration_ns / this.tiles.columns;
    const tiles = Float64Array.from({ length: this.tiles.columns + 1 }, (_, column) => place(column * wide));
    this.positions.set(axis, { blocks: { from, to }, grounds: { from: grounds.from.map(place), to: grounds.to.map(place) }, empty: this.empty.map((spans) => spans.map(place)), tiles });
  }
  private emptiness(): number[][] {
    const { blocks, grounds } = this;
    if (this.tiles.tiled) return Array.from(grounds.addr, () => []);
    const order = Array.from(blocks.addr.keys()).sort((a, b) => blocks.addr[a] - blocks.addr[b] || blocks.from[a] - blocks.from[b]);
    const sorted = Float64Array.from(order, (i) => blocks.addr[i]);
    return Array.from(grounds.addr, (addr, g) => {
      if (grounds.kind[g] > 1) return [];
      const spans: [number, number][] = [];
      for (let at = upTo(sorted, addr - 1); at < sorted.length && sorted[at] < addr + grounds.bytes[g]; at++) {
        const i = order[at];
        if (blocks.to[i] > grounds.from[g] && blocks.from[i] < grounds.to[g]) spans.push([blocks.from[i], blocks.to[i]]);
      }
      spans.sort((a, b) => a[0] - b[0]);
      const empty: number[] = [];
      let until = grounds.from[g];
      for (const [from, to] of spans) {
        if (from > until) empty.push(until, from);
        until = Math.max(until, to);
      }
      if (until < grounds.to[g]) empty.push(until, grounds.to[g]);
      return empty;
    });
  }
  /** The block at an address and a time, or -1. Later ones lie on earlier ones. */
  find(addr: number, time: number): number {
    const { blocks } = this;
    for (let i = upTo(blocks.from, time) - 1; i >= 0; i--) {
      if (time < blocks.to[i] && addr >= blocks.addr[i] && addr < blocks.addr[i] + blocks.bytes[i]) return i;
    }
    return -1;
  }
  /** Whether all that was there in a state is kept. */
  isWhole(state: number): boolean {
    const { device, device: { head, times, n } } = this;
    const isKept = (at: number) => at === times[state] || (state === n - 1 && device.at(at) === n - 1);
    return [head.blocks, head.grounds].every((all) => !all.n_tiled || all.whole_at.some(isKept));
  }
  /** What is in each segment of PyTorch at a time, most free first. */
  segments(time: number): Segment[] {
    const { blocks, grounds } = this, found: Segment[] = [];
    for (let g = 0; g < grounds.n; g++) {
      if (grounds.kind[g] > 1 || grounds.from[g] > time || grounds.to[g] <= time) continue;
      found.push({ addr: grounds.addr[g], bytes: grounds.bytes[g], live: 0, blocks: [], isPages: grounds.kind[g] === 1, pool: grounds.pool[g] });
    }
    found.sort((a, b) => a.addr - b.addr);
    // Neighbouring pages of an expandable segment are one.
    const joined: Segment[] = [];
    for (const segment of found) {
      const last = joined[joined.length - 1];
      if (last?.isPages && segment.isPages && last.pool === segment.pool && last.addr + last.bytes === segment.addr) last.bytes += segment.bytes;
      else joined.push(segment);
    }
    const starts = joined.map((segment) => segment.addr);
    for (let i = 0; i < blocks.n; i++) {
      if (blocks.from[i] > time || blocks.to[i] <= time) continue;
      const segment = joined[upTo(starts, blocks.addr[i]) - 1];
      if (!segment || blocks.addr[i] >= segment.addr + segment.bytes) continue;
      segment.live += blocks.bytes[i];
      segment.blocks.push(i);
    }
    return joined.sort((a, b) => b.bytes - b.live - (a.bytes - a.live) || a.addr - b.addr);
  }
}

interface Placed { compact: Compact; lows: Float64Array; highs: Float64Array; groundLows: Float64Array; groundHighs: Float64Array; tileLows: Float64Array; tileHighs: Float64Array; empty: number[][] }

/** Beginnings and ends on an axis; of tiles where each column begins. */
export interface Positions {
  blocks: { from: Float64Array; to: Float64Array };
  grounds: { from: Float64Array; to: Float64Array };
  empty: number[][];
  tiles: Float64Array;
}

export interface Segment { addr: number; bytes: number; live: number; blocks: number[]; isPages: boolean; pool: number }
