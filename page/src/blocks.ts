// The timeline of blocks: each block is a band as high as it is large, from its birth to its death, on the blocks that were born
// before it; it moves down when one of those is freed. Bands are made for columns of pixels: the cost is that of the pixels, however
// many events there were.
import type { Rectangles } from "./model";

/** Most bands of one picture. */
export const MOST_BANDS = 4000;

/** The largest of the blocks that are there between two times, of holders that are wanted, in the order of their births; how many others
 * there are. `is` says of single blocks whether they are wanted. */
export function choose(blocks: Rectangles, [from, to]: [number, number], least: number, most: number, wanted: Uint8Array, is: ((block: number) => boolean) | null = null): { ids: Int32Array; left: number } {
  const { what, bytes, n } = blocks, [births, deaths] = [blocks.from, blocks.to];
  let found: number[] = [], left = 0;
  for (let i = 0; i < n && births[i] <= to; i++) {
    if (deaths[i] < from || !wanted[what[i]] || (is && !is(i))) continue;
    if (bytes[i] >= least) found.push(i); else left++;
  }
  if (found.length > most) {
    const order = Int32Array.from(found).sort((a, b) => blocks.bytes[b] - blocks.bytes[a] || a - b);
    left += found.length - most;
    found = Array.from(order.subarray(0, most)).sort((a, b) => a - b);
  }
  return { ids: Int32Array.from(found), left };
}

/** For each of these ascending times, the chosen blocks that are there, in the order of their births: the first `n` of `live`. Times that
 * are not numbers are left out. */
export function sweep(blocks: Rectangles, ids: Int32Array, times: Float64Array, each: (column: number, live: Int32Array, n: number) => void) {
  const live = new Int32Array(ids.length);
  let n = 0, next = 0;
  for (let column = 0; column < times.length; column++) {
    const time = times[column];
    if (Number.isNaN(time)) continue;
    let kept = 0;
    for (let k = 0; k < n; k++) if (blocks.to[live[k]] > time) live[kept++] = live[k];
    for (; next < ids.length && blocks.from[ids[next]] <= time; next++) if (blocks.to[ids[next]] > time) live[kept++] = ids[next];
    n = kept;
    each(column, live, n);
  }
}

/** Four shades of a colour, so that neighbours of one colour are told apart. */
export function shades(colour: string): string[] {
  const parts = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
  const mix = (target: number, part: number) => "#" + parts.map((it) => Math.round(it + (target - it) * part).toString(16).padStart(2, "0")).join("");
  return [colour, mix(255, 0.16), mix(0, 0.12), mix(255, 0.3)];
}

/** Which of its shades a block has: the same in every picture. */
export const shadeOf = (block: number): number => (Math.imul(block + 1, 0x9e3779b1) >>> 29) & 3;
