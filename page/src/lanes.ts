// What happened on the axis, kind by kind: ranges that lie in one another have rows of their own.
import type { Axis, Chapter, Device, Mark } from "./model";

export interface Lane { title: string; kind: string; list: Mark[] }

const LANES: [string, string][] = [["out of memory", "OOM"], ["step", "steps"], ["nvtx", "NVTX"], ["cache emptied", "emptied"], ["nccl", "NCCL"], ["finding", "findings"]];
/** Most rows of one kind; what lies deeper is drawn in the last. */
const MOST_ROWS = 6;
const made = new WeakMap<Chapter, Lane[]>();

export function lanes(chapter: Chapter): Lane[] {
  let found = made.get(chapter);
  if (!found) {
    found = LANES.flatMap(([kind, title]) => {
      const list = chapter.marks.get(kind)?.list ?? [];
      return (kind === "nvtx" ? rows(list) : list.length ? [list] : []).map((list, row) => ({ title: row ? "" : title, kind, list }));
    });
    made.set(chapter, found);
  }
  return found;
}

/** Each range in the first row that is free from its beginning on, behind those that it lies in. */
export function rows(list: Mark[]): Mark[][] {
  const end = (mark: Mark) => mark.to ?? Infinity, order = [...list].sort((a, b) => a.from - b.from || end(b) - end(a)), rows: Mark[][] = [], ends: number[] = [];
  for (const mark of order) {
    let row = ends.findIndex((until) => until <= mark.from);
    if (row < 0) row = Math.min(ends.length, MOST_ROWS - 1);
    (rows[row] ??= []).push(mark);
    ends[row] = Math.max(ends[row] ?? 0, end(mark));
  }
  return rows;
}

const placed = new WeakMap<Lane, Map<string, [Float64Array, Float64Array]>>();

/** Where the marks of a row begin and end on an axis; what did not end reaches its end. */
export function positions(lane: Lane, device: Device, axis: Axis, end: number): [Float64Array, Float64Array] {
  let known = placed.get(lane);
  if (!known) placed.set(lane, (known = new Map()));
  const key = [axis, device.head.device, device.n].join();
  let found = known.get(key);
  if (!found) known.set(key, (found = [Float64Array.from(lane.list, (mark) => device.place(axis, mark.from)), Float64Array.from(lane.list, (mark) => (mark.to === null ? end : device.place(axis, mark.to)))]));
  return found;
}
