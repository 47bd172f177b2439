// The selection: one block, or everything with something in common. All views outline the same blocks, holders and times.
import { GROUPINGS, GROUPING_TITLES, type Chapter, type Device, type Grouping, type Mark } from "./model";
import { bytes } from "./format";
import { upTo } from "./pyramid";

export type Pick =
  | { kind: "block"; from: number; addr: number }
  | { kind: "group"; by: Grouping; name: string }
  /** A line of the program: the call site itself or, where no call site has this name, any line of a stack. */
  | { kind: "line"; text: string }
  /** A frame of the flame graph, with those around it; `isInner`: the innermost line comes first. */
  | { kind: "frames"; names: string[]; isInner: boolean }
  | { kind: "size"; bytes: number }
  | { kind: "segment"; from: number; addr: number }
  /** Blocks that were handed out between two times. */
  | { kind: "time"; from: number; to: number; text: string }
  /** Something that happened: no memory belongs to it, and nothing is faded for it. */
  | { kind: "mark"; of: string; from: number };

/** What has blocks or holders. */
type OfMemory = Exclude<Pick, { kind: "mark" }>;

/** Marks that are selected as what they are; the others stand for what was handed out meanwhile. */
export const SELF = ["cache emptied", "out of memory"];
/** The mark that is selected. */
export function markOf(pick: Pick | null, chapter: Chapter): Mark | null {
  return pick?.kind === "mark" ? chapter.marks.get(pick.of)?.list.find((mark) => mark.from === pick.from) ?? null : null;
}
/** A mark in a few words. */
export const markTitle = (mark: Mark): string => (mark.kind === "cache emptied" ? `Cache released at ${mark.text}` : `Request for ${bytes(mark.bytes)} refused`);

/** For the link. */
export const written = (pick: Pick): string => JSON.stringify(pick);

/** What a link says; null where it is not a selection. */
export function readPick(text: string | undefined): Pick | null {
  let it: any;
  try { it = JSON.parse(text ?? ""); } catch { return null; }
  if (!it || typeof it !== "object") return null;
  const isText = (value: unknown) => typeof value === "string", isNumber = (value: unknown) => typeof value === "number" && Number.isFinite(value);
  switch (it.kind) {
    case "block": case "segment": return isNumber(it.from) && isNumber(it.addr) ? { kind: it.kind, from: it.from, addr: it.addr } : null;
    case "group": return GROUPINGS.includes(it.by) && isText(it.name) ? { kind: "group", by: it.by, name: it.name } : null;
    case "line": return isText(it.text) ? { kind: "line", text: it.text } : null;
    case "frames": return Array.isArray(it.names) && it.names.length && it.names.every(isText) ? { kind: "frames", names: it.names, isInner: it.isInner === true } : null;
    case "size": return isNumber(it.bytes) ? { kind: "size", bytes: it.bytes } : null;
    case "time": return isNumber(it.from) && isNumber(it.to) && isText(it.text) ? { kind: "time", from: it.from, to: it.to, text: it.text } : null;
    case "mark": return SELF.includes(it.of) && isNumber(it.from) ? { kind: "mark", of: it.of, from: it.from } : null;
    default: return null;
  }
}

/** A selection in one device. */
export class Picked {
  /** The block, where it is one; -1 otherwise. */
  readonly block: number = -1;
  /** The segment, where it is one; -1 otherwise. */
  readonly ground: number = -1;
  /** Holders that have a part in it. */
  readonly holders: boolean[];
  /** Whether all that these holders have is selected. */
  readonly isWhole: boolean;
  /** The blocks that are selected, where they are fewer than all of their holders'. */
  private blocks: Set<number> | null = null;
  private sums: Float64Array | null = null;
  constructor(readonly pick: OfMemory, readonly device: Device) {
    const { chapter } = device, { holders } = chapter;
    const byHolder = (is: (index: number) => boolean) => holders.map((_, index) => is(index));
    this.isWhole = true;
    switch (pick.kind) {
      case "group": this.holders = byHolder((i) => holders[i][pick.by] === pick.name); return;
      case "line": {
        const isSite = holders.some((holder) => holder.site === pick.text);
        this.holders = byHolder((i) => (isSite ? holders[i].site === pick.text : chapter.stackOf(holders[i]).some((line) => line.includes(pick.text))));
        return;
      }
      case "frames": this.holders = byHolder((i) => {
        const lines = chapter.stackOf(holders[i]);
        if (pick.isInner) lines.reverse();
        return [holders[i].owner, ...lines].slice(0, pick.names.length).every((name, at) => name === pick.names[at]) && lines.length + 1 >= pick.names.length;
      }); return;
    }
    this.isWhole = false;
    const map = device.rectangles(), { blocks, grounds } = map, found = new Set<number>();
    const one = (all: { n: number; from: Float64Array; addr: Float64Array }, from: number, addr: number) => {
      for (let i = upTo(all.from, from - 1); i < all.n && all.from[i] <= from; i++) if (all.from[i] === from && all.addr[i] === addr) return i;
      return -1;
    };
    if (pick.kind === "block") {
      this.block = one(blocks, pick.from, pick.addr);
      if (this.block >= 0) found.add(this.block);
    } else if (pick.kind === "size") {
      for (let i = 0; i < blocks.n; i++) if (blocks.bytes[i] === pick.bytes) found.add(i);
    } else if (pick.kind === "time") {
      for (let i = upTo(blocks.from, pick.from - 1); i < blocks.n && blocks.from[i] <= pick.to; i++) found.add(i);
    } else {
      this.ground = one(grounds, pick.from, pick.addr);
      const g = this.ground;
      for (let i = 0; g >= 0 && i < blocks.n; i++) {
        if (blocks.addr[i] >= grounds.addr[g] && blocks.addr[i] < grounds.addr[g] + grounds.bytes[g] && blocks.from[i] < grounds.to[g] && blocks.to[i] > grounds.from[g]) found.add(i);
      }
    }
    this.blocks = found;
    this.holders = holders.map(() => false);
    for (const i of found) this.holders[blocks.what[i]] = true;
  }
  /** Whether a block is selected. */
  has(block: number): boolean {
    return this.blocks ? this.blocks.has(block) : this.holders[this.what[block]];
  }
  /** Whose each block is: read only where blocks are asked for. */
  private get what(): Float64Array { return (this.whose ??= this.device.rectangles().blocks.what); }
  private whose: Float64Array | null = null;
  /** The blocks that are selected, of those that the page has, in the order of their births. */
  get list(): number[] {
    if (this.listed) return this.listed;
    const { n, what } = this.device.rectangles().blocks, list: number[] = this.blocks ? [...this.blocks].sort((a, b) => a - b) : [];
    if (!this.blocks) for (let i = 0; i < n; i++) if (this.holders[what[i]]) list.push(i);
    return (this.listed = list);
  }
  private listed: number[] | null = null;
  /** The bytes of its holders in each state. Of single blocks, of that much their holders have more. */
  get bytes(): Float64Array { return (this.sums ??= this.device.sum((holder) => this.holders[holder])); }
  /** What it is, in a few words. */
  get title(): string { return titled(this.pick, this.device.chapter, this); }
  /** From when to when it is there: of a block its life. */
  get span(): [number, number] | null {
    const { pick, device } = this, { blocks, grounds } = device.rectangles();
    if (this.block >= 0) return [blocks.from[this.block], blocks.to[this.block]];
    if (this.ground >= 0) return [grounds.from[this.ground], grounds.to[this.ground]];
    if (pick.kind === "time") return [pick.from, pick.to];
    const list = this.list;
    return list.length ? [blocks.from[list[0]], list.reduce((to, i) => Math.max(to, blocks.to[i]), 0)] : null;
  }
}

function titled(pick: OfMemory, chapter: Chapter, picked: Picked): string {
  switch (pick.kind) {
    case "block": return picked.block < 0 ? "A block that this page does not have" : `Block of ${bytes(picked.device.rectangles().blocks.bytes[picked.block])}`;
    case "segment": return picked.ground < 0 ? "A segment that this page does not have" : `Segment of ${bytes(picked.device.rectangles().grounds.bytes[picked.ground])}`;
    case "group": return `${GROUPING_TITLES[pick.by]}: ${pick.name}`;
    case "line": return `Line: ${pick.text}`;
    case "frames": return `Frame: ${pick.names[pick.names.length - 1]}`;
    case "size": return `Blocks of ${bytes(pick.bytes)}`;
    case "time": return chapter.marks.get("step")?.list.some((it) => it.from === pick.from) ? `Allocated in ${pick.text}` : `Allocated during ${pick.text}`;
  }
}
