// A picture made in memory, pixel by pixel: for a hundred thousand rectangles that is faster than a canvas draws them, and as fast
// on every machine. What is thinner than a pixel is gathered: how much of each pixel it covers, and of which colour it is.

/** A colour `#rrggbb` as a pixel. */
export function packed(colour: string): number {
  const [r, g, b] = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
  return (0xff000000 | (b << 16) | (g << 8) | r) >>> 0;
}

/** `over` on top of `under`, of which nothing may be seen yet. */
export function mixed(under: number, over: number, alpha: number): number {
  if (under >>> 24 === 255) {
    // Red and blue at once, then green, in 256ths.
    const part = (alpha * 256) | 0, rest = 256 - part;
    return (0xff000000 | ((((under & 0xff00ff) * rest + (over & 0xff00ff) * part) >>> 8) & 0xff00ff) | ((((under & 0xff00) * rest + (over & 0xff00) * part) >>> 8) & 0xff00)) >>> 0;
  }
  const old = (under >>> 24) / 255, all = alpha + old * (1 - alpha);
  if (all <= 0) return 0;
  const part = (shift: number) => Math.round((((over >>> shift) & 255) * alpha + ((under >>> shift) & 255) * old * (1 - alpha)) / all) << shift;
  return ((Math.round(all * 255) << 24) | part(16) | part(8) | part(0)) >>> 0;
}

export class Raster {
  width = 0;
  height = 0;
  pixels = new Uint32Array(0);
  private covered = new Float32Array(0);
  private colour = new Uint32Array(0);
  /** What was painted last. */
  canvas: HTMLCanvasElement | null = null;
  begin(width: number, height: number): this {
    if (width * height !== this.pixels.length) {
      const n = width * height;
      [this.pixels, this.covered, this.colour] = [new Uint32Array(n), new Float32Array(n), new Uint32Array(n)];
    } else {
      this.pixels.fill(0);
      this.covered.fill(0);
    }
    [this.width, this.height] = [width, height];
    return this;
  }
  /** From pixel to pixel, at least one; what is outside of the picture is left out. */
  fill(left: number, top: number, right: number, bottom: number, colour: number, alpha = 1) {
    left = Math.round(left);
    top = Math.round(top);
    right = Math.min(this.width, Math.max(left + 1, Math.round(right)));
    bottom = Math.min(this.height, Math.max(top + 1, Math.round(bottom)));
    left = Math.max(0, left);
    if (left >= right) return;
    for (let row = Math.max(0, top); row < bottom; row++) {
      const from = row * this.width + left, to = row * this.width + right;
      if (alpha < 1) for (let at = from; at < to; at++) this.pixels[at] = mixed(this.pixels[at], colour, alpha);
      // A call for a few pixels takes longer than they do.
      else if (to - from < 24) for (let at = from; at < to; at++) this.pixels[at] = colour;
      else this.pixels.fill(colour, from, to);
    }
  }
  /** A part of some columns, in whole pixels that lie inside. */
  column(left: number, right: number, top: number, bottom: number, colour: number) {
    const { width, pixels } = this, end = Math.min(this.height, bottom), to = Math.min(width, right);
    for (let row = Math.max(0, top), start = row * width; row < end; row++, start += width) for (let at = left; at < to; at++) pixels[start + at] = colour;
  }
  /** The same from pixel to pixel, with stripes: `wide` pixels of the screen are one of the page. */
  hatched(left: number, right: number, top: number, bottom: number, colour: number, stripe: number, wide: number) {
    if (bottom <= 0 || top >= this.height || right <= 0 || left >= this.width) return;
    left = Math.max(0, Math.round(left));
    right = Math.min(this.width, Math.max(left + 1, Math.round(right)));
    top = Math.max(0, Math.round(top));
    bottom = Math.min(this.height, Math.max(top + 1, Math.round(bottom)));
    const every = Math.round(7 * wide), thick = Math.round(1.4 * wide);
    for (let row = top; row < bottom; row++) {
      for (let at = left, phase = (left + row) % every; at < right; at++, phase = phase + 1 === every ? 0 : phase + 1) this.pixels[row * this.width + at] = phase < thick ? stripe : colour;
    }
  }
  /** What is thinner than a pixel, and covers this part of those that it touches. */
  thin(left: number, top: number, right: number, bottom: number, colour: number, weight: number) {
    const part = weight * Math.max(0.1, Math.min(1, right - left) * Math.min(1, bottom - top));
    left = Math.max(0, Math.floor(left));
    top = Math.max(0, Math.floor(top));
    right = Math.min(this.width, Math.max(left + 1, Math.ceil(right)));
    bottom = Math.min(this.height, Math.max(top + 1, Math.ceil(bottom)));
    for (let row = top; row < bottom; row++) {
      for (let at = row * this.width + left, end = row * this.width + right; at < end; at++) {
        this.covered[at] += part;
        this.colour[at] = colour;
      }
    }
  }
  /** Puts what was gathered on the picture; a pixel with anything in it is seen. */
  gathered(): this {
    for (let at = 0; at < this.covered.length; at++) {
      const covered = this.covered[at];
      if (covered >= 1) this.pixels[at] = this.colour[at];
      else if (covered) this.pixels[at] = mixed(this.pixels[at], this.colour[at], Math.max(0.2, covered));
    }
    return this;
  }
  /** The picture, for `drawImage`: what is below it stays where nothing was drawn. */
  painted(): HTMLCanvasElement {
    const canvas = (this.canvas ??= document.createElement("canvas"));
    if (canvas.width !== this.width || canvas.height !== this.height) [canvas.width, canvas.height] = [this.width, this.height];
    canvas.getContext("2d")!.putImageData(new ImageData(new Uint8ClampedArray(this.pixels.buffer as ArrayBuffer), this.width, this.height), 0, 0);
    return canvas;
  }
}
