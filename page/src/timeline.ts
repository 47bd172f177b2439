// Memory over time, stacked by group. A column of pixels shows the highest of its states, part by part as it was at that very
// instant, and how low the device was in between; so no spike and no dip is lost.
import { h, Picture, fitted, shortSite } from "./dom";
import { colours, theme, isLight } from "./colours";
import { bytes, count, tickBytes, tickTime, ticks, time } from "./format";
import type { Device, Mark } from "./model";
import { upTo } from "./pyramid";
import { packed, Raster } from "./raster";
import type { View } from "./view";

const LEFT = 74, RIGHT = 12, TOP = 10, PLOT = 230, LANE = 15, AXIS = 20;
const LANES: [string, string][] = [["out of memory", "OOM"], ["step", "steps"], ["nvtx", "NVTX"], ["cache emptied", "emptied"], ["nccl", "NCCL"], ["finding", "findings"]];

/** The highest state in a pixel column, or the one that lasts over it; the lowest; from where to where its states are. */
type Column = [number, number, number, number];
interface Plotted { key: string; columns: Column[]; top: number }

export class Timeline {
  readonly element: HTMLElement;
  readonly picture: Picture;
  private readout = h("p", { class: "readout", "aria-live": "polite" });
  private legend = h("ul", { class: "legend" });
  private raster = new Raster();
  private shown: Plotted | null = null;
  private listed = "";
  private hover: number | null = null;
  private drag: { from: number; isPan: boolean; window: [number, number] } | null = null;

  constructor(private view: View) {
    this.picture = new Picture(400, "Memory over time. Arrow keys move the cursor, P jumps to the peak, plus and minus zoom.", (context, width) => this.draw(context, width));
    this.element = h("div", { class: "timeline" }, this.picture.canvas, this.readout, this.legend);
    this.listen();
  }
  private get lanes() {
    return LANES.map(([kind, title]) => [title, this.view.trace.marks.get(kind)?.list ?? []] as const).filter(([, list]) => list.length);
  }
  update() {
    this.picture.height = TOP + PLOT + AXIS + this.lanes.length * LANE + 6;
    this.picture.redraw();
    this.describe();
  }
  private x(at: number, width: number): number {
    const [from, to] = this.view.window;
    return LEFT + ((at - from) / (to - from)) * (width - LEFT - RIGHT);
  }
  private position(x: number): number {
    const [from, to] = this.view.window;
    return from + ((x - LEFT) / (this.picture.width - LEFT - RIGHT)) * (to - from);
  }
  private column(x: number): Column {
    const device = this.view.dev!, positions = this.view.positions;
    const first = upTo(positions, this.position(x)) - 1, next = upTo(positions, this.position(x + 1));
    const from = Math.max(0, first);
    return [device.highest.best(from, Math.max(next, from + 1)), device.lowest.best(from, Math.max(next, from + 1)), from, next];
  }
  private draw(context: CanvasRenderingContext2D, width: number) {
    const { view } = this, device = view.dev, colour = theme();
    const bottom = TOP + PLOT;
    if (!device || !device.n) {
      context.fillStyle = colour.soft;
      context.fillText("No memory of a device was handed out.", LEFT, TOP + 20);
      return;
    }
    const plot = width - LEFT - RIGHT, { columns, top } = this.plotted(device, plot, colour), { litBytes } = view;
    const y = (value: number) => bottom - (value / top) * PLOT;
    this.axes(context, width, top, y, colour);
    context.imageSmoothingEnabled = false;
    context.drawImage(this.raster.painted(), LEFT, TOP, this.raster.width / this.picture.ratio, PLOT);
    if (litBytes) {
      context.strokeStyle = colour.ink;
      context.lineWidth = 1.5;
      context.beginPath();
      columns.forEach(([high], x) => { if (high >= 0) context[x ? "lineTo" : "moveTo"](LEFT + x + 0.5, y(litBytes[high])); });
      context.stroke();
    }
    this.chosen(context, width, bottom, colour);
    this.drawLanes(context, width, bottom + AXIS, colour);
  }
  /** The areas, as they are until what is looked at changes. */
  private plotted(device: Device, plot: number, colour: ReturnType<typeof theme>): Plotted {
    const { view } = this, { ratio } = this.picture;
    const key = [view.reading, view.axis, ...view.window, plot, ratio, view.by, view.only, colour.panel].join();
    if (key === this.shown?.key) return this.shown;
    const series = device.series(view.by), tints = colours(series.groups.map((group) => group.name)).map(packed), [ink, panel] = [colour.ink, colour.panel].map(packed);
    const chosen = view.only === null ? -1 : series.groups.findIndex((group) => group.name === view.only), order = chosen >= 0 ? [chosen] : [...series.groups.keys()];
    const columns: Column[] = [];
    let top = 0;
    for (let x = 0; x < plot; x++) {
      const column = this.column(LEFT + x);
      columns.push(column);
      const [high] = column;
      if (high < 0 || this.position(LEFT + x) > view.extent[1]) continue;
      top = Math.max(top, chosen >= 0 ? series.bytes[chosen][high] : device.total[high]);
    }
    top = (top || 1) * 1.06;
    const raster = this.raster.begin(Math.ceil(plot * ratio), Math.round(PLOT * ratio)), y = (value: number) => (1 - value / top) * PLOT * ratio;
    for (let x = 0; x < plot; x++) {
      const [high, low, first, next] = columns[x];
      if (high < 0 || this.position(LEFT + x + 1) < view.at(0)) continue;
      const [left, right] = [x * ratio, (x + 1) * ratio];
      let base = 0;
      for (const group of order) {
        const value = series.bytes[group][high];
        if (value <= 0) continue;
        const [upper, lower] = [y(base + value), y(base)];
        // What is lower than half a pixel gives way to what is not.
        if (Math.round(lower) > Math.round(upper)) raster.fill(left, upper, right, lower, tints[group]);
        else raster.fill(left, upper, right, lower, tints[group], 0.5);
        base += value;
      }
      if (chosen >= 0) continue;
      if (device.total[low] < device.total[high]) raster.fill(left, y(device.total[high]), right, y(device.total[low]), panel, 0.35);
      // Where most was in use at another instant of the column than most was held.
      const from = Math.max(0, first), full = device.fullest.best(from, Math.max(next, from + 1));
      if (full >= 0 && device.used[full] > device.used[high]) raster.fill(left, y(device.used[full]), right, y(device.used[full]) + ratio, ink, 0.55);
    }
    return (this.shown = { key, columns, top });
  }
  private axes(context: CanvasRenderingContext2D, width: number, top: number, y: (value: number) => number, colour: ReturnType<typeof theme>) {
    const { view } = this;
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (const at of ticks(0, top, 5, true)) {
      context.fillStyle = colour.line;
      context.fillRect(LEFT, Math.round(y(at)), width - LEFT - RIGHT, 1);
      context.fillStyle = colour.soft;
      context.fillText(tickBytes(at), LEFT - 8, y(at));
    }
    context.textBaseline = "top";
    context.textAlign = "center";
    const [from, to] = view.window, marks = ticks(from, to, Math.max(3, Math.floor(width / 130)), false), step = marks.length > 1 ? marks[1] - marks[0] : to - from;
    for (const at of marks) {
      context.fillStyle = colour.line;
      context.fillRect(Math.round(this.x(at, width)), TOP + PLOT, 1, 4);
      context.fillStyle = colour.soft;
      context.fillText(view.axis === "time" ? tickTime(at, step) : "change " + count(Math.round(at)), Math.min(this.x(at, width), width - 34), TOP + PLOT + 6);
    }
  }
  private chosen(context: CanvasRenderingContext2D, width: number, bottom: number, colour: ReturnType<typeof theme>) {
    const { view } = this, line = (state: number, style: string, label: string, dash: number[]) => {
      const x = this.x(view.at(state), width);
      if (x < LEFT - 1 || x > width - RIGHT + 1) return;
      context.strokeStyle = style;
      context.lineWidth = 1.5;
      context.setLineDash(dash);
      context.beginPath();
      context.moveTo(x, TOP);
      context.lineTo(x, bottom + 4);
      context.stroke();
      context.setLineDash([]);
      context.textBaseline = "top";
      const wide = context.measureText(label).width + 8, isLeft = x + wide + 4 > width;
      context.fillStyle = style;
      context.fillRect(isLeft ? x - wide : x, TOP - 2, wide, 14);
      context.fillStyle = colour.panel;
      context.textAlign = "left";
      context.fillText(label, (isLeft ? x - wide : x) + 4, TOP);
    };
    if (view.range) {
      const [from, to] = view.range.map((state) => this.x(view.at(state), width));
      context.fillStyle = colour.accent;
      context.globalAlpha = 0.14;
      context.fillRect(Math.max(from, LEFT), TOP, Math.max(1, Math.min(to, width - RIGHT) - Math.max(from, LEFT)), PLOT);
      context.globalAlpha = 1;
    }
    for (const oom of view.trace.marks.get("out of memory")?.list ?? []) {
      const x = this.x(this.place(oom.from), width);
      if (x < LEFT || x > width - RIGHT) continue;
      context.fillStyle = colour.bad;
      context.fillRect(x - 0.75, TOP, 1.5, bottom - TOP);
    }
    if (view.base !== null) line(view.base, colour.soft, "base", [4, 3]);
    line(view.cursor, colour.ink, view.cursor === view.dev!.peak ? "cursor, at the peak" : "cursor", []);
    if (this.hover !== null) {
      context.fillStyle = colour.soft;
      context.fillRect(this.hover, TOP, 1, PLOT);
    }
  }
  /** Where a time lies on the axis. */
  private place(at: number): number {
    return this.view.axis === "time" ? at : this.view.at(Math.max(0, this.view.dev!.at(at)));
  }
  private drawLanes(context: CanvasRenderingContext2D, width: number, top: number, colour: ReturnType<typeof theme>) {
    const { view } = this, pattern = view.search.pattern;
    this.lanes.forEach(([title, list], lane) => {
      const y = top + lane * LANE;
      context.fillStyle = colour.soft;
      context.textAlign = "right";
      context.textBaseline = "middle";
      context.fillText(fitted(context, title, LEFT - 10), LEFT - 8, y + LANE / 2);
      context.textAlign = "left";
      let until = -1, isOdd = false;
      for (const mark of list) {
        const from = Math.max(LEFT, this.x(this.place(mark.from), width));
        const to = Math.min(width - RIGHT, this.x(mark.to === null ? view.extent[1] : this.place(mark.to), width));
        if (to < LEFT || from > width - RIGHT) continue;
        isOdd = !isOdd;
        const isFinding = title === "findings", isBad = title === "OOM" || isFinding || (title === "NCCL" && mark.to === null), isLit = pattern?.test(mark.text);
        // What is below a pixel and where something is drawn already is not drawn again.
        if (to - from < 1 && from < until && !isBad && !isLit) continue;
        const tint = isBad ? colour.bad : isLit ? colour.accent : title === "NCCL" ? "#009e73" : title === "cache emptied" ? "#d55e00" : isOdd ? "#8aa5b8" : "#b4c6d2";
        context.fillStyle = tint;
        context.fillRect(isFinding ? from - 1.5 : from, y + 2, Math.max(isFinding ? 4 : 1.5, to - from - 0.5), LANE - 4);
        context.fillStyle = isLight(tint.startsWith("#") && tint.length === 7 ? tint : "#888888") ? "#111" : "#fff";
        if (to - from > 30) context.fillText(fitted(context, mark.text, to - from - 6), from + 3, y + LANE / 2 + 0.5);
        until = from + 1;
      }
    });
  }
  private describe() {
    const { view } = this, device = view.dev;
    if (!device || !device.n) return;
    const state = this.hover === null ? view.cursor : Math.max(0, device.at0(view, this.position(this.hover)));
    const series = device.series(view.by), step = view.trace.marks.get("step")?.list.find((it) => it.from <= device.times[state] && (it.to ?? Infinity) >= device.times[state]);
    const where = `${this.hover === null ? "Cursor" : "Here"}: ${time(device.times[state])}${step ? ", " + step.text : ""}, change ${count(device.changes[state])} of ${count(device.head.n_changes)}, ${bytes(device.total[state])} held (${((device.total[state] / (device.total[device.peak] || 1)) * 100).toFixed(1)} % of the peak)`;
    const cut = view.window[0] > view.extent[0] || view.window[1] < view.extent[1] ? " A part of the axis is seen; 0 shows all." : "";
    // What is wrong with the job, where this trace shows it, within some pixels.
    const near = (this.position(4) - this.position(0)), at = this.hover === null ? view.at(view.cursor) : this.position(this.hover);
    const wrong = view.trace.marks.get("finding")?.list.filter((it) => Math.abs(this.place(it.from) - at) <= near || device.at(it.from) === state).map((it) => ` Here: ${it.text}.`) ?? [];
    const lit = view.lit ? `; the search lights up ${bytes(view.litBytes![state])}` : "";
    const { whole } = device.head, [from, to] = view.axis === "time" ? view.window : [Infinity, 0];
    const kept = whole && whole[0] <= from && whole[1] >= Math.min(to, view.trace.head.duration_ns) ? ". All changes of this part are here." : device.head.stretch > 1 ? `. Of every ${count(device.head.stretch)} changes the highest, the lowest, the last state and that with most in use are kept (${count(device.n)} of ${count(device.head.n_changes)}).` : ".";
    this.readout.textContent = where + lit + kept + cut + [...new Set(wrong)].join("");
    const tints = colours(series.groups.map((group) => group.name)), listed = [view.reading, view.by, view.only, state, ...tints].join();
    if (listed === this.listed) return;
    this.listed = listed;
    this.legend.replaceChildren(...series.groups.map((group, i) => {
      const swatch = h("span", { class: "swatch" });
      swatch.style.background = tints[i];
      const button = h("button", { type: "button", "aria-pressed": view.only === group.name, title: `Show only this; at most ${bytes(group.peak)}`, onclick: () => { view.only = view.only === group.name ? null : group.name; view.changed(); } }, swatch, shortSite(group.name), h("span", { class: "amount" }, bytes(series.bytes[i][state])));
      return h("li", {}, button);
    }));
  }
  private listen() {
    const { view } = this, canvas = this.picture.canvas;
    const state = (x: number) => Math.max(0, view.dev!.at0(view, this.position(x)));
    canvas.addEventListener("pointermove", (event) => {
      if (!view.dev?.n) return;
      if (this.drag?.isPan) {
        const size = this.drag.window[1] - this.drag.window[0], moved = ((event.offsetX - this.drag.from) / (this.picture.width - LEFT - RIGHT)) * size;
        view.zoom(this.drag.window[0] - moved, this.drag.window[1] - moved);
        return view.changed();
      }
      this.hover = event.offsetX < LEFT || event.offsetX > this.picture.width - RIGHT ? null : event.offsetX;
      if (this.drag && Math.abs(event.offsetX - this.drag.from) > 3) {
        const [from, to] = [this.drag.from, event.offsetX].sort((a, b) => a - b);
        view.range = [state(from), state(to)];
      }
      this.picture.redraw();
      this.describe();
    });
    canvas.addEventListener("pointerleave", () => { this.hover = null; this.update(); });
    canvas.addEventListener("pointerdown", (event) => {
      if (!view.dev?.n || event.button > 1) return;
      canvas.setPointerCapture(event.pointerId);
      this.drag = { from: event.offsetX, isPan: event.shiftKey || event.button === 1, window: view.window };
    });
    canvas.addEventListener("pointerup", (event) => {
      const drag = this.drag;
      this.drag = null;
      if (!drag || drag.isPan || !view.dev?.n) return;
      if (Math.abs(event.offsetX - drag.from) <= 3) {
        view.range = null;
        view.cursor = state(event.offsetX);
        if (view.moment !== "base") view.moment = "cursor";
      } else {
        view.moment = "range";
      }
      view.changed();
    });
    canvas.addEventListener("dblclick", () => { view.window = view.extent; view.changed(); });
    canvas.addEventListener("wheel", (event) => {
      if (!view.dev?.n || (!event.ctrlKey && !event.shiftKey && !event.altKey && document.activeElement !== canvas)) return;
      event.preventDefault();
      this.zoomAt(this.position(event.offsetX), Math.exp((event.deltaY || event.deltaX) / 400));
    }, { passive: false });
    canvas.addEventListener("keydown", (event) => this.key(event));
  }
  zoomAt(at: number, factor: number) {
    const { view } = this, [from, to] = view.window;
    view.zoom(at - (at - from) * factor, at + (to - at) * factor);
    view.changed();
  }
  private key(event: KeyboardEvent) {
    const { view } = this, device = view.dev;
    if (!device?.n || event.ctrlKey || event.metaKey || event.altKey) return;
    const far = Math.max(1, Math.round(device.n / 50)), step = event.shiftKey ? far : 1;
    if (event.key === "ArrowRight") this.move(view.cursor + step);
    else if (event.key === "ArrowLeft") this.move(view.cursor - step);
    else if (event.key === "Home") this.move(0);
    else if (event.key === "End") this.move(device.n - 1);
    else return;
    event.preventDefault();
  }
  /** Moves the cursor, and what is seen with it. */
  move(state: number) {
    const { view } = this;
    view.cursor = Math.min(Math.max(0, state), view.dev!.n - 1);
    if (view.moment !== "base") view.moment = "cursor";
    const at = view.at(view.cursor), [from, to] = view.window;
    if (at < from || at > to) view.zoom(at - (to - from) / 2, at + (to - from) / 2);
    view.changed();
  }
  /** The next mark of a kind behind the cursor, or the first. */
  next(kind: string) {
    const { view } = this, list: Mark[] = view.trace.marks.get(kind)?.list ?? [];
    if (!list.length || !view.dev?.n) return;
    const mark = list.find((mark) => view.dev!.at(mark.from) > view.cursor) ?? list[0];
    this.move(view.dev.at(mark.from));
  }
}
