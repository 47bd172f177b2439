// The highest and the lowest of any range of states in logarithmic time: a row of indices, then one of half the length that
// has the better of each two, and so on. No spike is lost at any width.

export class Pyramid {
  private levels: Int32Array[] = [];
  /** Of equal values, those of `ties` decide. */
  constructor(private values: Float64Array, private sign: 1 | -1, private ties: Float64Array = values) {
    let below = Int32Array.from(values, (_, i) => i);
    this.levels.push(below);
    while (below.length > 1) {
      const above = new Int32Array((below.length + 1) >> 1);
      for (let i = 0; i < above.length; i++) {
        above[i] = 2 * i + 1 < below.length ? this.better(below[2 * i], below[2 * i + 1]) : below[2 * i];
      }
      this.levels.push(below = above);
    }
  }
  private better(a: number, b: number): number {
    const more = this.values[b] - this.values[a] || this.ties[b] - this.ties[a];
    return this.sign * more > 0 ? b : a;
  }
  /** Index of the first best in [from, to); -1 where that is empty. */
  best(from: number, to: number): number {
    // From the left in their order, from the right against it.
    let level = 0, first = -1, last = -1;
    while (from < to) {
      if (from & 1) { const index = this.levels[level][from++]; first = first < 0 ? index : this.better(first, index); }
      if (to & 1) { const index = this.levels[level][--to]; last = last < 0 ? index : this.better(index, last); }
      from >>= 1; to >>= 1; level++;
    }
    return first < 0 ? last : last < 0 ? first : this.better(first, last);
  }
}

/** The number of values that are at most `wanted`; they ascend. */
export function upTo(values: ArrayLike<number>, wanted: number): number {
  let from = 0, to = values.length;
  while (from < to) {
    const middle = (from + to) >> 1;
    if (values[middle] <= wanted) from = middle + 1; else to = middle;
  }
  return from;
}
