// What happened, event by event: blocks handed out and freed, segments, failed requests. Made once per device, when it is first shown.
import type { Device } from "./model";
import { upTo } from "./pyramid";

/** At one time frees come first: what they give back may be handed out again. */
export const EVENT = { freed: 0, returned: 1, failed: 2, bought: 3, born: 4 };

export interface Events { n: number; time: Float64Array; kind: Uint8Array; of: Int32Array }
const made = new WeakMap<Device, Events>();

/** All events of a device that this page has, in their order. */
export function events(device: Device): Events {
  let found = made.get(device);
  if (!found) made.set(device, (found = listed(device)));
  return found;
}

function listed(device: Device): Events {
  const { blocks, grounds } = device.rectangles(), end = device.chapter.head.duration_ns;
  // Births are in their order already.
  const freed = Uint32Array.from(blocks.to.keys()).filter((i) => blocks.to[i] < end).sort((a, b) => blocks.to[a] - blocks.to[b]);
  const others: [number, number, number][] = [];
  for (let g = 0; g < grounds.n; g++) {
    if (grounds.kind[g] > 1) continue;
    others.push([grounds.from[g], EVENT.bought, g]);
    if (grounds.to[g] < end) others.push([grounds.to[g], EVENT.returned, g]);
  }
  (device.chapter.marks.get("out of memory")?.list ?? []).forEach((mark, i) => { if (mark.device < 0 || mark.device === device.head.device) others.push([mark.from, EVENT.failed, i]); });
  others.sort((a, b) => a[0] - b[0] || a[1] - b[1]);
  const n = blocks.n + freed.length + others.length, list: Events = { n, time: new Float64Array(n), kind: new Uint8Array(n), of: new Int32Array(n) };
  let born = 0, gone = 0, other = 0;
  for (let at = 0; at < n; at++) {
    const [free, rest, birth] = [gone < freed.length ? blocks.to[freed[gone]] : Infinity, other < others.length ? others[other][0] : Infinity, born < blocks.n ? blocks.from[born] : Infinity];
    if (free <= rest && free <= birth) [list.time[at], list.kind[at], list.of[at]] = [free, EVENT.freed, freed[gone++]];
    else if (rest <= birth) [list.time[at], list.kind[at], list.of[at]] = others[other++];
    else [list.time[at], list.kind[at], list.of[at]] = [birth, EVENT.born, born++];
  }
  return list;
}

/** The last event that is not later than a time; the one of this block where several are at that time. */
export function eventAt(list: Events, time: number, block = -1): number {
  const last = upTo(list.time, time) - 1;
  for (let i = last; block >= 0 && i >= 0 && list.time[i] === time; i--) if (list.of[i] === block && (list.kind[i] === EVENT.born || list.kind[i] === EVENT.freed)) return i;
  return last;
}
