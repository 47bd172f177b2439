// What is thinner than a pixel, gathered pixel by pixel: how much of it is covered, and by which group most recently.

export class Density {
  private canvas = document.createElement("canvas");
  private covered = new Float32Array(0);
  private group = new Uint8Array(0);
  private width = 0;
  private height = 0;
  begin(width: number, height: number): this {
    if (width * height !== this.covered.length) {
      this.covered = new Float32Array(width * height);
      this.group = new Uint8Array(width * height);
    } else {
      this.covered.fill(0);
    }
    [this.width, this.height] = [width, height];
    return this;
  }
  add(x: number, y: number, wide: number, tall: number, group: number, weight: number) {
    const left = Math.max(0, Math.floor(x)), right = Math.min(this.width, Math.max(left + 1, Math.ceil(x + wide)));
    const top = Math.max(0, Math.floor(y)), bottom = Math.min(this.height, Math.max(top + 1, Math.ceil(y + tall)));
    const part = weight * Math.max(0.1, Math.min(1, wide) * Math.min(1, tall));
    for (let row = top; row < bottom; row++) {
      for (let at = row * this.width + left, end = row * this.width + right; at < end; at++) {
        this.covered[at] += part;
        this.group[at] = group;
      }
    }
  }
  /** A picture of it; a pixel with anything in it is seen. */
  painted(colours: string[]): HTMLCanvasElement {
    const { canvas, width, height } = this;
    [canvas.width, canvas.height] = [Math.max(1, width), Math.max(1, height)];
    const context = canvas.getContext("2d")!, image = context.createImageData(canvas.width, canvas.height), { data } = image;
    const parts = colours.map((colour) => [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16)));
    for (let at = 0; at < this.covered.length; at++) {
      const covered = this.covered[at];
      if (!covered) continue;
      const [red, green, blue] = parts[this.group[at]];
      data[4 * at] = red;
      data[4 * at + 1] = green;
      data[4 * at + 2] = blue;
      data[4 * at + 3] = 255 * Math.min(1, Math.max(0.2, covered));
    }
    context.putImageData(image, 0, 0);
    return canvas;
  }
}
