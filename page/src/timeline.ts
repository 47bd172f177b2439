// Memory over time: a band per block, or an area per group. A column of pixels shows the highest of its states, part by part as it was
// at that very instant; so no spike is lost.
import { axisLabels } from "./axis";
import { choose, MOST_BANDS, shadeOf, shades, sweep } from "./blocks";
import { h, Picture, fitted, shortSite } from "./dom";
import { colours, theme, isLight } from "./colours";
import { bytes, count, tickBytes, ticks, time } from "./format";
import { lanes, positions, type Lane } from "./lanes";
import { isRest, type Device, type Mark } from "./model";
import { SELF } from "./pick";
import { upTo } from "./pyramid";
import { mixed, packed, Raster } from "./raster";
import { HEIGHTS, type View } from "./view";

export const LEFT = 74, RIGHT = 12;
const TOP = 14, LANE = 15, AXIS = 20, MAP = 34;
/** So many outlines are drawn at most; more are told apart by their colour alone. */
const MOST_OUTLINES = 60;
/** What is not selected keeps this much of its colour. */
const FADED = 0.6;

/** The highest state in a pixel column, or the one that lasts over it; the lowest; from where to where its states are. */
type Column = [number, number, number, number];
/** Where a band is in each column of pixels: column, bottom, top, and so on. */
type Outline = number[];
/** `low` and `top`: the bytes at the lower and the upper edge; `whole`: at the upper edge of all of it. */
interface Plotted { key: string; columns: Column[]; low: number; top: number; whole: number; times: Float64Array; ids: Int32Array; left: number; outlines: Map<number, Outline>; rest: number }
/** What is at a place of the picture: a block, or what is left of a group. */
interface Found { block: number; group: number; state: number }

export class Timeline {
  readonly element: HTMLElement;
  readonly picture: Picture;
  private overview: Picture;
  private readout = h("p", { class: "readout", "aria-live": "polite" });
  private note = h("p", { class: "note" });
  private legend = h("ul", { class: "legend" });
  /** What is dragged to make the picture higher. */
  private grip = h("div", { class: "grip", role: "separator", "aria-orientation": "horizontal", "aria-label": "Height of memory over time", "aria-valuemin": HEIGHTS[0], "aria-valuemax": HEIGHTS[1], tabindex: 0, title: "Drag, or up and down: the height of the picture" });
  private raster = new Raster();
  private shown: Plotted | null = null;
  private listed = "";
  private heights: { key: string; of: Float64Array } | null = null;
  private hover: { x: number; y: number } | null = null;
  private found: Found | null = null;
  private drag: { from: number; isPan: boolean; window: [number, number] } | null = null;

  constructor(private view: View) {
    this.picture = new Picture(400, "Memory over time. Left and right move the cursor, up and down go through the blocks that are allocated and freed, W and S zoom, A and D move, Enter selects the largest block at the cursor.", (context, width) => this.draw(context, width));
    this.overview = new Picture(MAP, "", (context, width) => this.drawOverview(context, width));
    this.overview.canvas.removeAttribute("role");
    this.overview.canvas.removeAttribute("aria-label");
    this.overview.canvas.tabIndex = -1;
    this.overview.canvas.setAttribute("aria-hidden", "true");
    this.overview.canvas.classList.add("overview");
    this.element = h("div", { class: "timeline" }, this.picture.canvas, this.overview.canvas, this.grip, this.readout, this.note, this.legend);
    this.listen();
    this.listenOverview();
    this.listenGrip();
  }
  update() {
    this.picture.height = TOP + this.plot + AXIS + lanes(this.view.trace).length * LANE + 6;
    this.element.classList.toggle("pinned", this.view.isPinned);
    this.grip.setAttribute("aria-valuenow", String(this.view.height));
    this.picture.redraw();
    this.overview.redraw();
    this.describe();
  }
  /** How high the plot is. */
  private get plot(): number { return this.view.height; }
  private x(at: number, width: number): number {
    const [from, to] = this.view.window;
    return LEFT + ((at - from) / (to - from)) * (width - LEFT - RIGHT);
  }
  position(x: number): number {
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
    const bottom = TOP + this.plot;
    if (!device || !device.n) {
      context.fillStyle = colour.soft;
      context.fillText("No memory of a device was allocated.", LEFT, TOP + 20);
      return;
    }
    const plot = width - LEFT - RIGHT, plotted = this.plotted(device, plot, colour), { columns, low, top } = plotted, { litBytes, picked } = view;
    const y = (value: number) => bottom - ((value - low) / (top - low)) * this.plot;
    this.axes(context, width, [low, top], y, colour);
    context.save();
    context.beginPath();
    context.rect(LEFT, 0, plot, bottom);
    context.clip();
    context.imageSmoothingEnabled = false;
    context.drawImage(this.raster.painted(), LEFT, TOP, this.raster.width / this.picture.ratio, this.plot);
    const line = (sums: Float64Array) => {
      context.strokeStyle = colour.ink;
      context.lineWidth = 1.5;
      context.beginPath();
      columns.forEach(([high], x) => { if (high >= 0) context[x ? "lineTo" : "moveTo"](LEFT + x + 0.5, y(sums[high])); });
      context.stroke();
    };
    if (litBytes) line(litBytes);
    if (picked?.isWhole && view.drawn === "groups" && !view.isAlone) line(picked.bytes);
    const labels = this.limits(context, width, y, columns, top, colour);
    this.outlined(context, [...plotted.outlines.values()], colour.ink, colour.panel);
    if (this.found && this.found.block >= 0 && !plotted.outlines.has(this.found.block)) this.outlined(context, [this.outlineOf(this.found.block, plotted)], colour.ink, colour.panel);
    context.restore();
    this.chosen(context, width, bottom, colour);
    labels();
    this.drawLanes(context, width, bottom + AXIS, colour);
    this.remark(device);
  }
  /** Strokes around bands, dark on pale: what is inside keeps its colour, however narrow it is. */
  private outlined(context: CanvasRenderingContext2D, outlines: Outline[], ink: string, panel: string) {
    if (!outlines.some((outline) => outline.length)) return;
    const path = new Path2D();
    for (const outline of outlines) this.trace(path, outline);
    const outside = new Path2D();
    outside.rect(0, 0, this.picture.width, TOP + this.plot);
    outside.addPath(path);
    context.save();
    context.clip(outside, "evenodd");
    for (const [style, wide] of [[panel, 5], [ink, 3]] as const) {
      context.strokeStyle = style;
      context.lineWidth = wide;
      context.stroke(path);
    }
    context.restore();
  }
  private trace(path: Path2D, outline: Outline) {
    const { ratio } = this.picture;
    for (let from = 0; from < outline.length;) {
      let to = from + 3;
      while (to < outline.length && outline[to] === outline[to - 3] + 1) to += 3;
      const x = (at: number) => LEFT + outline[at], [low, high] = [1, 2].map((side) => (at: number) => TOP + outline[at + side] / ratio);
      path.moveTo(x(from), low(from));
      // Only where the edge moves: a long band has few corners.
      for (let at = from; at < to; at += 3) {
        if (at === from || outline[at + 2] !== outline[at - 1]) path.lineTo(x(at), high(at));
        if (at + 3 >= to || outline[at + 5] !== outline[at + 2]) path.lineTo(x(at) + 1, high(at));
      }
      for (let at = to - 3; at >= from; at -= 3) {
        if (at + 3 >= to || outline[at + 4] !== outline[at + 1]) path.lineTo(x(at) + 1, low(at));
        if (at === from || outline[at - 2] !== outline[at + 1]) path.lineTo(x(at), low(at));
      }
      path.closePath();
      from = to;
    }
  }
  /** Where a block is in the picture. */
  private outlineOf(block: number, { ids, times, low, top }: Plotted): Outline {
    const { view } = this, { blocks } = view.dev!.rectangles(), outline: Outline = [], scale = (this.plot * this.picture.ratio) / (top - low), tall = this.plot * this.picture.ratio + low * scale;
    sweep(blocks, ids, times, (column, live, n) => {
      let base = 0;
      for (let k = 0; k < n; k++) {
        if (live[k] === block) { outline.push(column, tall - base * scale, tall - (base + blocks.bytes[block]) * scale); return; }
        base += blocks.bytes[live[k]];
      }
    });
    return outline;
  }
  /** Which holders are drawn: all, those of one group, or the selection. */
  private get wanted(): (holder: number) => boolean {
    const { view } = this, series = view.dev!.series(view.by), only = view.only === null ? -1 : series.groups.findIndex((group) => group.name === view.only);
    const picked = view.isAlone ? view.picked : null, { holders } = view.trace;
    return (holder) => (only < 0 || series.groupOf[holder] === only) && (!picked || picked.holders[holder]) && (!view.hidesUnused || !isRest(holders[holder].level));
  }
  /** The areas, as they are until what is looked at changes. */
  private plotted(device: Device, plot: number, colour: ReturnType<typeof theme>): Plotted {
    const { view } = this, { ratio } = this.picture, picked = view.picked;
    const key = [view.reading, view.axis, ...view.window, ...view.rise, plot, this.plot, ratio, view.by, view.only, view.drawn, view.hidesUnused, view.hasLines, view.picking, colour.panel].join();
    if (key === this.shown?.key) return this.shown;
    const { holders } = view.trace, series = device.series(view.by), names = series.groups.map((group) => group.name), tints = colours(names), panel = packed(colour.panel);
    const wanted = this.wanted, isAll = view.only === null && !view.isAlone && !view.hidesUnused;
    // Bytes of each group that are drawn, by state.
    const parts = isAll ? series.bytes : this.partsOf(device, wanted);
    const unused = series.groups.map((group) => group.holders.every((holder) => isRest(holders[holder].level)));
    const height = (state: number) => { let sum = 0; for (const part of parts) sum += part[state]; return sum; };
    const columns: Column[] = [], times = new Float64Array(plot).fill(NaN);
    let top = 0;
    for (let x = 0; x < plot; x++) {
      const column = this.column(LEFT + x), [high] = column;
      columns.push(column);
      if (high < 0 || this.position(LEFT + x) > view.extent[1] || this.position(LEFT + x + 1) < view.at(0)) continue;
      if (!isAll) this.higher(column, parts);
      times[x] = device.times[column[0]];
      top = Math.max(top, height(column[0]));
    }
    // What was refused belongs into the picture, as do lines above it that are asked for.
    const refused = this.refused().filter(({ at }) => at >= view.window[0] && at <= view.window[1] && !view.isAlone);
    for (const { from, bytes } of refused) if (bytes < top * 3) top = Math.max(top, from + bytes);
    if (view.hasLines) for (const [, level] of this.levels()) if (level < top * 40) top = Math.max(top, level);
    const whole = (top || 1) * 1.06, low = whole * view.rise[0];
    top = whole * view.rise[1];
    const height_ = Math.round(this.plot * ratio), scale = height_ / (top - low), raster = this.raster.begin(Math.ceil(plot * ratio), height_), tall = height_ + Math.round(low * scale);
    const map = device.rectangles(), { blocks } = map, hasBlocks = view.drawn === "blocks";
    const span = [device.times[columns[0]?.[0] ?? 0] ?? 0, device.times[Math.max(0, columns.at(-1)?.[0] ?? 0)] ?? 0] as [number, number];
    const isShown = Uint8Array.from(holders, (holder, i) => Number(wanted(i) && !isRest(holder.level) && series.groupOf[i] >= 0));
    const { ids, left } = hasBlocks ? choose(blocks, span, 0.75 / scale, MOST_BANDS, isShown, view.isAlone && picked && !picked.isWhole ? (block) => picked.has(block) : null) : { ids: new Int32Array(0), left: 0 };
    const faded = (tint: number) => mixed(tint, panel, FADED), isFaded = picked !== null && !view.isAlone;
    const bands = tints.map((tint) => shades(tint).map(packed)), pale = bands.map((four) => four.map(faded)), edges = tints.map((tint) => mixed(packed(tint), packed("#000000"), 0.3));
    const few = picked ? ids.filter((id) => picked.has(id)) : null, outlines = new Map<number, Outline>();
    if (few && few.length <= MOST_OUTLINES) for (const id of few) outlines.set(id, []);
    const drawnOf = new Float64Array(parts.length), hatch = packed(colour.hatch);
    let rest = 0;
    const column = (x: number, live: Int32Array, n: number) => {
      const [high] = columns[x], [from, to] = [Math.round(x * ratio), Math.round((x + 1) * ratio)];
      let base = 0, below = tall;
      drawnOf.fill(0);
      for (let k = 0; k < n; k++) {
        const id = live[k], group = series.groupOf[blocks.what[id]];
        base += blocks.bytes[id];
        drawnOf[group] += blocks.bytes[id];
        const upper = tall - Math.round(base * scale);
        if (upper >= below) continue;
        const isPicked = picked !== null && picked.has(id), shade = shadeOf(id);
        raster.column(from, to, upper, below, (isFaded && !isPicked ? pale : bands)[group][shade]);
        // An edge between bands that have room for one.
        if (below - upper >= 3 * ratio) raster.column(from, to, upper, upper + 1, isFaded && !isPicked ? faded(edges[group]) : edges[group]);
        if (isPicked) outlines.get(id)?.push(x, below, upper);
        below = upper;
      }
      for (let group = 0; group < parts.length; group++) {
        const value = Math.max(0, parts[group][high] - drawnOf[group]);
        if (value <= 0) continue;
        if (hasBlocks && !unused[group]) rest = Math.max(rest, value);
        base += value;
        const upper = tall - Math.round(base * scale);
        if (upper >= below) continue;
        const isOther = isFaded && !series.groups[group].holders.some((holder) => picked.holders[holder]) || isFaded && hasBlocks;
        if (unused[group]) raster.hatched(from, to, upper, below, packed(tints[group]), hatch, ratio);
        else raster.column(from, to, upper, below, isOther ? faded(packed(tints[group])) : hasBlocks ? bands[group][3] : packed(tints[group]));
        below = upper;
      }
    };
    const none = new Int32Array(0);
    if (ids.length) sweep(blocks, ids, times, column);
    else for (let x = 0; x < plot; x++) if (!Number.isNaN(times[x])) column(x, none, 0);
    // The outline of what was reserved, where the unused part is hidden.
    return (this.shown = { key, columns, low, top, whole, times, ids, left, outlines, rest });
  }
  /** The bytes of what is drawn of each group, in each state: the same while one moves. */
  private partsOf(device: Device, wanted: (holder: number) => boolean): Float64Array[] {
    const { view } = this, series = device.series(view.by), key = [view.reading, view.by, view.only, view.hidesUnused, view.isAlone ? view.picking : ""].join();
    if (this.parts?.key !== key) {
      const isDrawn = Uint8Array.from(view.trace.holders, (_, holder) => Number(wanted(holder)));
      const of = series.groups.map(() => new Float64Array(device.n)), now = new Float64Array(series.groups.length);
      for (let state = 0, row = 0; state < device.n; state++) {
        for (; row < device.rowEnds[state]; row++) if (isDrawn[device.rowHolder[row]]) now[series.groupOf[device.rowHolder[row]]] += device.rowBytes[row];
        for (let group = 0; group < now.length; group++) of[group][state] = now[group];
      }
      this.parts = { key, of };
    }
    return this.parts.of;
  }
  private parts: { key: string; of: Float64Array[] } | null = null;
  /** Of a part of the groups, the highest state of a column is another one than that of all. Looks at no more than some states. */
  private higher(column: Column, parts: Float64Array[]) {
    const [, , from, next] = column, until = Math.max(next, from + 1), every = Math.max(1, Math.floor((until - from) / 64));
    let best = column[0], most = -1;
    for (let state = from; state < until; state += every) {
      let sum = 0;
      for (const part of parts) sum += part[state];
      if (sum > most) [best, most] = [state, sum];
    }
    column[0] = best;
  }
  /** Requests that failed: where on the axis, on how much, and how much was asked for. */
  private refused(): { at: number; from: number; bytes: number; mark: Mark }[] {
    const { view } = this, device = view.dev!;
    return (view.trace.marks.get("out of memory")?.list ?? []).filter((mark) => mark.device < 0 || mark.device === device.head.device).map((mark) => {
      const state = Math.max(0, device.at(mark.from));
      return { at: device.place(view.axis, mark.from), from: view.hidesUnused ? device.used[state] : device.total[state], bytes: mark.bytes, mark };
    });
  }
  /** Whether PyTorch refused the last of them by itself: enough was free. */
  private get isOwnLimit(): boolean {
    const items = this.view.trace.head.report.sections.find((section) => section.name === "oom")?.items ?? [];
    return items.some((item) => "fact" in item && item.fact === "free_bytes" && /a limit/.test(item.remark));
  }
  private get summary(): any {
    const { view } = this;
    return view.data.head.summary?.processes?.[view.chapter]?.devices.find((it: any) => it.device === view.dev?.head.device) ?? null;
  }
  /** Lines above what was handed out: what they are, and how high. */
  private levels(): [string, number][] {
    const { view, summary } = this, device = view.dev!;
    if (!summary) return [];
    const levels: [string, number][] = [], context = summary.cuda_context_bytes ?? 0, nvml = Math.max(0, ...(summary.samples ?? []).map((it: any) => it.process_used_bytes ?? 0));
    if (context) levels.push(["with the CUDA context, at most", (device.total[device.peak] ?? 0) + context]);
    if (nvml) levels.push(["the driver's figure for the process, at most", nvml]);
    if (summary.total_bytes) levels.push(["the card", summary.total_bytes]);
    return levels;
  }
  /** Lines above what was handed out, and requests that failed. Their labels are drawn by what it returns: above the lines of the cursor. */
  private limits(context: CanvasRenderingContext2D, width: number, y: (value: number) => number, columns: Column[], top: number, colour: ReturnType<typeof theme>): () => void {
    const { view, summary } = this, device = view.dev!, right = width - RIGHT;
    const label = (text: string, x: number, at: number, style: string, align: CanvasTextAlign) => {
      context.textAlign = align;
      context.textBaseline = "bottom";
      context.lineWidth = 3;
      context.strokeStyle = colour.panel;
      context.strokeText(text, x, at - 2);
      context.fillStyle = style;
      context.fillText(text, x, at - 2);
    };
    const stroke = (style: string, dash: number[], wide: number, path: () => void) => {
      context.strokeStyle = style;
      context.lineWidth = wide;
      context.setLineDash(dash);
      context.beginPath();
      path();
      context.stroke();
      context.setLineDash([]);
    };
    if (view.hidesUnused && !view.isAlone && view.only === null) {
      stroke(colour.ink, [], 1, () => {
        let isOpen = false;
        columns.forEach(([high], x) => {
          const at = high < 0 ? -1 : y(device.total[high]);
          if (at >= TOP) context[isOpen ? "lineTo" : "moveTo"](LEFT + x + 0.5, at);
          isOpen = at >= TOP;
        });
      });
      if (y(device.total[device.peak]) < TOP) label(`reserved: up to ${bytes(device.total[device.peak])}, above the picture`, LEFT + 6, TOP + 14, colour.soft, "left");
    }
    if (view.hasLines && summary) {
      const total = summary.total_bytes ?? 0, handed = summary.cuda_context_bytes ?? 0;
      if (handed) {
        stroke(colour.soft, [5, 3], 1.25, () => columns.forEach(([high], x) => { if (high >= 0) context[x ? "lineTo" : "moveTo"](LEFT + x + 0.5, y(device.total[high] + handed)); }));
        label(`with the CUDA context (${bytes(handed)})`, right - 4, y(device.total[Math.max(0, columns.at(-1)![0])] + handed), colour.soft, "right");
      }
      const samples = (summary.samples ?? []).map((it: any) => [this.x(device.place(view.axis, it.time_ns), width), it.process_used_bytes]).filter(([x]: number[]) => x >= LEFT && x <= right);
      for (const [x, used] of samples) { context.fillStyle = colour.accent; context.fillRect(x - 3, y(used) - 1, 7, 3); }
      if (samples.length) label("the driver's figure", Math.min(samples[0][0] + 8, right - 110), y(samples[0][1]) + 6, colour.accent, "left");
      if (total && total <= top) { stroke(colour.bad, [], 1.5, () => { context.moveTo(LEFT, y(total)); context.lineTo(right, y(total)); }); label(`the card: ${bytes(total)}`, right - 4, y(total) + 15, colour.bad, "right"); }
    }
    const refused = view.isAlone ? [] : this.refused(), labels: { text: string; x: number; at: number; isLeft: boolean; wide: number }[] = [];
    for (const { at, from, bytes: asked, mark } of refused) {
      const x = this.x(at, width);
      if (x < LEFT || x > right || !asked) continue;
      const [low, high] = [y(from), Math.max(TOP, y(from + asked))];
      stroke(colour.bad, [3, 2], 1.25, () => context.rect(x, high, Math.max(10, Math.min(60, right - x - 1)), low - high));
      const isLeft = x > width / 2, text = `${bytes(asked)} refused${mark === refused.at(-1)?.mark && this.isOwnLimit ? ", by a limit of PyTorch" : ""}`;
      labels.push({ text, x: isLeft ? x - 5 : x + 5, at: Math.max(TOP + 26, high + 12), isLeft, wide: context.measureText(text).width });
    }
    // Those that would lie on each other are above each other.
    return () => labels.sort((a, b) => b.at - a.at).forEach((it, i) => {
      const left = (one: typeof it) => (one.isLeft ? one.x - one.wide : one.x), near = (one: typeof it) => left(one) < left(it) + it.wide && left(it) < left(one) + one.wide;
      const above = labels.slice(0, i).filter(near).reduce((at, one) => Math.min(at, one.at - 14), it.at);
      it.at = Math.max(TOP + 12, above);
      label(it.text, it.x, it.at, colour.bad, it.isLeft ? "right" : "left");
    });
  }
  private axes(context: CanvasRenderingContext2D, width: number, [low, top]: [number, number], y: (value: number) => number, colour: ReturnType<typeof theme>) {
    const { view } = this;
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (const at of ticks(low, top, 5, true)) {
      context.fillStyle = colour.line;
      context.fillRect(LEFT, Math.round(y(at)), width - LEFT - RIGHT, 1);
      context.fillStyle = colour.soft;
      context.fillText(tickBytes(at), LEFT - 8, y(at));
    }
    context.textBaseline = "top";
    context.textAlign = "center";
    let until = 0;
    for (const [at, text] of axisLabels(view, width)) {
      context.fillStyle = colour.line;
      context.fillRect(Math.round(this.x(at, width)), TOP + this.plot, 1, 4);
      context.fillStyle = colour.soft;
      const half = context.measureText(text).width / 2 + 2;
      const middle = Math.max(half, Math.min(this.x(at, width), width - half));
      if (middle - half < until) continue;
      context.fillText(text, middle, TOP + this.plot + 6);
      until = middle + half + 6;
    }
  }
  private chosen(context: CanvasRenderingContext2D, width: number, bottom: number, colour: ReturnType<typeof theme>) {
    const { view } = this, line = (at: number, style: string, label: string, dash: number[]) => {
      const x = this.x(at, width);
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
      context.fillRect(isLeft ? x - wide : x, TOP - 14, wide, 14);
      context.fillStyle = colour.panel;
      context.textAlign = "left";
      context.fillText(label, (isLeft ? x - wide : x) + 4, TOP - 12);
    };
    if (view.span) {
      const [from, to] = view.span.map((at) => this.x(at, width));
      context.fillStyle = colour.accent;
      context.globalAlpha = 0.14;
      context.fillRect(Math.max(from, LEFT), TOP, Math.max(1, Math.min(to, width - RIGHT) - Math.max(from, LEFT)), this.plot);
      context.globalAlpha = 1;
    }
    if (view.pick?.kind === "time") {
      const [from, to] = [view.pick.from, view.pick.to].map((at) => this.x(view.dev!.place(view.axis, at), width));
      context.strokeStyle = colour.ink;
      context.lineWidth = 1.5;
      context.strokeRect(Math.max(from, LEFT), TOP, Math.max(2, Math.min(to, width - RIGHT) - Math.max(from, LEFT)), this.plot);
    }
    for (const oom of view.trace.marks.get("out of memory")?.list ?? []) {
      const x = this.x(this.place(oom.from), width);
      if (x < LEFT || x > width - RIGHT) continue;
      context.fillStyle = colour.bad;
      context.fillRect(x - 0.75, TOP, 1.5, bottom - TOP);
    }
    if (view.base !== null) line(view.at(view.base), colour.soft, "base", [4, 3]);
    line(view.cursorPlace, colour.ink, view.cursor === view.dev!.peak && view.cursorAt === null ? "cursor, at the peak" : "cursor", []);
    if (this.hover !== null) {
      context.fillStyle = colour.soft;
      context.fillRect(this.hover.x, TOP, 1, this.plot);
    }
  }
  /** Where a time lies on the axis. */
  private place(at: number): number {
    return this.view.dev!.place(this.view.axis, at);
  }
  private drawLanes(context: CanvasRenderingContext2D, width: number, top: number, colour: ReturnType<typeof theme>) {
    const { view } = this, pattern = view.search.pattern, pick = view.pick?.kind === "time" ? view.pick : null, { marked } = view;
    lanes(view.trace).forEach((row, lane) => {
      const y = top + lane * LANE, { title, kind, list } = row, [froms, tos] = positions(row, view.dev!, view.axis, view.extent[1]);
      context.fillStyle = colour.soft;
      context.textAlign = "right";
      context.textBaseline = "middle";
      context.fillText(fitted(context, title, LEFT - 10), LEFT - 8, y + LANE / 2);
      context.textAlign = "left";
      let until = -1, isOdd = false;
      for (let i = 0; i < list.length; i++) {
        if (tos[i] < view.window[0] || froms[i] > view.window[1]) continue;
        const mark = list[i], from = Math.max(LEFT, this.x(froms[i], width)), to = Math.min(width - RIGHT, this.x(tos[i], width));
        isOdd = !isOdd;
        const isFinding = kind === "finding", isBad = kind === "out of memory" || isFinding || (kind === "nccl" && mark.to === null), isLit = pattern?.test(mark.text);
        const isPicked = mark === marked || (pick !== null && pick.from === mark.from && pick.text === mark.text);
        // What is below a pixel and where something is drawn already is not drawn again.
        if (to - from < 1 && from < until && !isBad && !isLit && !isPicked) continue;
        const tint = isBad ? colour.bad : isLit ? colour.accent : kind === "nccl" ? "#009e73" : kind === "cache emptied" ? "#d55e00" : isOdd ? "#8aa5b8" : "#b4c6d2";
        context.fillStyle = tint;
        context.fillRect(isFinding ? from - 1.5 : from, y + 2, Math.max(isFinding ? 4 : 1.5, to - from - 0.5), LANE - 4);
        if (isPicked) { context.strokeStyle = colour.ink; context.lineWidth = 1.5; context.strokeRect(from, y + 1.5, Math.max(3, to - from), LANE - 3); }
        context.fillStyle = isLight(tint.startsWith("#") && tint.length === 7 ? tint : "#888888") ? "#111" : "#fff";
        until = from + 1;
        if (to - from <= 18) continue;
        // The row says that these are steps.
        const number = kind === "step" && context.measureText(mark.text).width > to - from - 6 ? /\d+$/.exec(mark.text)?.[0] : undefined;
        if (number && context.measureText(number).width <= to - from - 4) context.fillText(number, from + 2, y + LANE / 2 + 0.5);
        else if (!number && to - from > 30) context.fillText(fitted(context, mark.text, to - from - 6), from + 3, y + LANE / 2 + 0.5);
      }
    });
  }
  /** All of the time, small; what is seen of it. */
  private drawOverview(context: CanvasRenderingContext2D, width: number) {
    const { view } = this, device = view.dev, colour = theme();
    if (!device?.n) return;
    const [first, last] = view.extent, plot = width - LEFT - RIGHT, top = device.total[device.peak] || 1, positions = view.positions;
    context.fillStyle = colour.soft;
    context.textAlign = "right";
    context.textBaseline = "middle";
    context.fillText("all", LEFT - 8, MAP / 2);
    context.fillStyle = colour.hatch;
    const key = [view.reading, view.axis, plot].join();
    if (this.heights?.key !== key) {
      const of = Float64Array.from({ length: plot }, (_, x) => {
        const at = first + (x / plot) * (last - first), from = Math.max(0, upTo(positions, at) - 1), next = upTo(positions, first + ((x + 1) / plot) * (last - first));
        return positions[from] > at + (last - first) / plot ? 0 : (device.total[device.highest.best(from, Math.max(next, from + 1))] / top) * (MAP - 8);
      });
      this.heights = { key, of };
    }
    context.beginPath();
    context.moveTo(LEFT, MAP - 3);
    this.heights.of.forEach((tall, x) => { context.lineTo(LEFT + x, MAP - 3 - tall); context.lineTo(LEFT + x + 1, MAP - 3 - tall); });
    context.lineTo(LEFT + plot, MAP - 3);
    context.fill();
    const [from, to] = view.window.map((at) => LEFT + ((at - first) / (last - first)) * plot);
    context.fillStyle = colour.accent;
    context.globalAlpha = 0.16;
    context.fillRect(from, 2, Math.max(2, to - from), MAP - 4);
    context.globalAlpha = 1;
    context.strokeStyle = colour.accent;
    context.lineWidth = 1.5;
    context.strokeRect(from, 2, Math.max(2, to - from), MAP - 4);
    const cursor = LEFT + ((view.cursorPlace - first) / (last - first)) * plot;
    context.fillStyle = colour.ink;
    context.fillRect(cursor, 2, 1, MAP - 4);
  }
  /** What is at a place of the picture. */
  private find(x: number, y: number): Found | null {
    const { view, shown } = this, device = view.dev, at = Math.floor(x - LEFT);
    if (!device?.n || !shown || at < 0 || at >= shown.columns.length || y < TOP || y > TOP + this.plot || Number.isNaN(shown.times[at])) return null;
    const wanted = shown.low + ((TOP + this.plot - y) / this.plot) * (shown.top - shown.low), { blocks } = device.rectangles(), series = device.series(view.by), state = shown.columns[at][0];
    const drawn = new Float64Array(series.groups.length), is = this.wanted;
    let base = 0, found: Found | null = null;
    sweep(blocks, shown.ids, Float64Array.of(shown.times[at]), (_, live, n) => {
      for (let k = 0; k < n && !found; k++) {
        base += blocks.bytes[live[k]];
        drawn[series.groupOf[blocks.what[live[k]]]] += blocks.bytes[live[k]];
        if (wanted < base) found = { block: live[k], group: series.groupOf[blocks.what[live[k]]], state };
      }
    });
    if (found) return found;
    for (let group = 0; group < drawn.length; group++) {
      const isAll = view.only === null && !view.isAlone && !view.hidesUnused, all = (isAll ? series.bytes : this.partsOf(device, is))[group][state];
      base += Math.max(0, all - drawn[group]);
      if (wanted < base) return { block: -1, group, state };
    }
    return null;
  }
  private describe() {
    const { view, found } = this, device = view.dev;
    if (!device || !device.n) return;
    const isHere = this.hover !== null, at = isHere ? this.position(this.hover!.x) : view.cursorPlace;
    const state = isHere ? Math.max(0, device.at0(view, at)) : view.cursor, when = isHere && view.axis === "time" ? Math.round(at) : isHere ? device.times[state] : Math.round(view.cursorTime);
    const series = device.series(view.by), step = view.trace.marks.get("step")?.list.find((it) => it.from <= when && (it.to ?? Infinity) >= when);
    const where = `${isHere ? "Here" : "Cursor"}: ${time(when)}${step ? ", " + step.text : ""}, change ${count(device.changes[state])} of ${count(device.head.n_changes)}, ${bytes(device.total[state])} held (${((device.total[state] / (device.total[device.peak] || 1)) * 100).toFixed(1)} % of the peak)`;
    // What is wrong with the job, where this trace shows it, within some pixels.
    const near = this.position(4) - this.position(0);
    const wrong = view.trace.marks.get("finding")?.list.filter((it) => Math.abs(this.place(it.from) - at) <= near || device.at(it.from) === state).map((it) => ` Here: ${it.text}.`) ?? [];
    const lit = view.lit ? `; the search lights up ${bytes(view.litBytes![state])}` : "";
    const block = found ? found.block >= 0 ? `. ${this.blockWords(found.block)}` : `. ${shortSite(series.groups[found.group].name)}${view.drawn === "blocks" && !series.groups[found.group].holders.every((holder) => isRest(view.trace.holders[holder].level)) ? ", smaller blocks together" : ""}` : "";
    this.readout.textContent = where + lit + block + [...new Set(wrong)].join("");
    const tints = colours(series.groups.map((group) => group.name)), listed = [view.reading, view.by, view.only, view.picking, state, ...tints].join();
    if (listed === this.listed) return;
    this.listed = listed;
    const isPicked = (name: string) => view.pick?.kind === "group" && view.pick.by === view.by && view.pick.name === name;
    this.legend.replaceChildren(...series.groups.map((group, i) => {
      const swatch = h("span", { class: "swatch" });
      swatch.style.background = tints[i];
      const isOthers = group.holders.length > 0 && !group.holders.some((holder) => view.trace.holders[holder][view.by] === group.name);
      const press = () => { if (isOthers) { view.only = view.only === group.name ? null : group.name; view.changed(); } else view.select(isPicked(group.name) ? null : { kind: "group", by: view.by, name: group.name }); };
      const button = h("button", { type: "button", "aria-pressed": isPicked(group.name) || view.only === group.name, title: `${isOthers ? "Show only these" : "Select"}; at most ${bytes(group.peak)}`, onclick: press }, swatch, h("span", { class: "label" }, shortSite(group.name)), h("span", { class: "amount" }, bytes(series.bytes[i][state])));
      return h("li", {}, button);
    }));
  }
  private blockWords(block: number): string {
    const { view } = this, { blocks } = view.dev!.rectangles(), holder = view.trace.holders[blocks.what[block]];
    return `${bytes(blocks.bytes[block])} for ${time(Math.round(blocks.to[block] - blocks.from[block]))}: ${holder.role === holder.owner ? holder.owner : `${holder.owner}, ${holder.role}`}, ${shortSite(holder.site)}`;
  }
  /** What the picture leaves out. */
  private remark(device: Device) {
    const { view, shown } = this, words: string[] = [], { whole } = device.head, [from, to] = view.axis === "time" ? view.window : [Infinity, 0], { tiled } = device.rectangles().tiles;
    if (shown && view.drawn === "blocks") {
      words.push(shown.ids.length ? shown.ids.length === 1 ? "1 block has a band" : `${count(shown.ids.length)} blocks have a band each` : "no block is as high as a pixel here");
      const joined = [shown.left ? `${count(shown.left)} smaller ${shown.left === 1 ? "block" : "blocks"} of this part` : "", tiled ? `the ${count(tiled)} of the trace that this page only counts` : "", "memory without an address"].filter(Boolean);
      if (shown.rest >= 1) words.push(`joined by ${view.by === "site" ? "call site" : view.by}, above them: ${joined.join(", and ")}: ${bytes(shown.rest)} at most in one group`);
    }
    if (whole && whole[0] <= from && whole[1] >= Math.min(to, view.trace.head.duration_ns)) words.push("all changes of this part are here");
    else if (device.head.stretch > 1) words.push(`of every ${count(device.head.stretch)} changes the highest, the lowest, the last state and the one with most in use are kept (${count(device.n)} of ${count(device.head.n_changes)})`);
    if (view.rise[1] - view.rise[0] < 1) words.push("a part of the height is shown");
    if (view.window[0] > view.extent[0] || view.window[1] < view.extent[1]) words.push("a part of the axis is shown: 0 shows all, F fits");
    const text = words.join("; ");
    const told = text ? text[0].toUpperCase() + text.slice(1) + "." : "";
    if (told !== this.note.textContent) this.note.textContent = told;
  }
  private listen() {
    const { view } = this, canvas = this.picture.canvas;
    canvas.addEventListener("pointermove", (event) => {
      if (!view.dev?.n) return;
      if (this.drag?.isPan) {
        const size = this.drag.window[1] - this.drag.window[0], moved = ((event.offsetX - this.drag.from) / (this.picture.width - LEFT - RIGHT)) * size;
        view.zoom(this.drag.window[0] - moved, this.drag.window[1] - moved);
        return view.changed();
      }
      this.hover = event.offsetX < LEFT || event.offsetX > this.picture.width - RIGHT ? null : { x: event.offsetX, y: event.offsetY };
      this.found = this.hover && !this.drag ? this.find(event.offsetX, event.offsetY) : null;
      canvas.style.cursor = this.found && this.found.block >= 0 || this.laneAt(event.offsetX, event.offsetY) ? "pointer" : "";
      if (this.drag && Math.abs(event.offsetX - this.drag.from) > 3) view.span = [this.drag.from, event.offsetX].sort((a, b) => a - b).map((x) => this.inside(x)) as [number, number];
      this.picture.redraw();
      this.describe();
    });
    canvas.addEventListener("pointerleave", () => { [this.hover, this.found] = [null, null]; this.update(); });
    canvas.addEventListener("pointerdown", (event) => {
      if (!view.dev?.n || event.button > 1) return;
      canvas.setPointerCapture(event.pointerId);
      this.drag = { from: event.offsetX, isPan: event.shiftKey || event.button === 1, window: view.window };
    });
    canvas.addEventListener("pointercancel", () => (this.drag = null));
    canvas.addEventListener("pointerup", (event) => {
      const drag = this.drag;
      this.drag = null;
      if (!drag || drag.isPan || !view.dev?.n) return;
      if (Math.abs(event.offsetX - drag.from) > 3) { view.moment = "range"; return view.changed(); }
      this.press(event.offsetX, event.offsetY);
    });
    canvas.addEventListener("dblclick", () => { view.window = view.fit ?? view.busy; view.rise = [0, 1]; view.changed(); });
    canvas.addEventListener("wheel", (event) => {
      if (!view.dev?.n) return;
      const wide = view.window[1] - view.window[0], turned = Math.exp((event.deltaY || event.deltaX) / (event.deltaMode ? 10 : 200));
      // On the scale of bytes, or with Shift as well: the height.
      if (event.offsetX < LEFT || ((event.ctrlKey || event.metaKey) && event.shiftKey)) { view.raise(this.heightAt(event.offsetY), turned); view.changed(); }
      else if (event.ctrlKey || event.metaKey || event.altKey) this.zoomAt(this.position(event.offsetX), turned);
      else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.pan(((event.deltaX || event.deltaY) / this.picture.width) * wide);
      else return;
      event.preventDefault();
    }, { passive: false });
    canvas.addEventListener("keydown", (event) => this.key(event));
  }
  /** A click: the cursor goes there, and what is there is selected. */
  private press(x: number, y: number) {
    const { view } = this, lane = this.laneAt(x, y), found = this.find(x, y), at = this.inside(x), device = view.dev!;
    view.span = null;
    if (lane) {
      view.put(device.at(lane.from) < 0 ? 0 : device.at(lane.from));
      view.moment = "cursor";
      return view.select(SELF.includes(lane.kind) ? { kind: "mark", of: lane.kind, from: lane.from } : { kind: "time", from: lane.from, to: lane.to ?? view.trace.head.duration_ns, text: lane.text });
    }
    view.put(device.at0(view, at), at);
    if (view.moment !== "base") view.moment = "cursor";
    if (!found) return view.isAlone ? view.changed() : view.select(null);
    const { blocks } = device.rectangles(), group = device.series(view.by).groups[found.group];
    if (found.block >= 0) return view.select({ kind: "block", from: blocks.from[found.block], addr: blocks.addr[found.block] });
    if (view.isAlone) return view.changed();
    return view.select(group.holders.some((holder) => view.trace.holders[holder][view.by] === group.name) ? { kind: "group", by: view.by, name: group.name } : null);
  }
  /** The place on the axis below a pixel, inside of the axis. */
  private inside(x: number): number {
    const [first, last] = this.view.extent;
    return Math.min(last, Math.max(first, this.position(Math.min(Math.max(x, LEFT), this.picture.width - RIGHT))));
  }
  private laneAt(x: number, y: number): Mark | null {
    const all: Lane[] = lanes(this.view.trace), lane = all[Math.floor((y - TOP - this.plot - AXIS) / LANE)];
    if (!lane || y < TOP + this.plot + AXIS || x < LEFT) return null;
    const at = this.position(x), near = this.position(x + 3) - at;
    const hit = lane.list.filter((mark) => this.place(mark.from) - near <= at && (mark.to === null ? Infinity : this.place(mark.to)) + near >= at);
    return hit.sort((a, b) => Math.abs(this.place(a.from) - at) - Math.abs(this.place(b.from) - at))[0] ?? null;
  }
  private listenOverview() {
    const { view } = this, canvas = this.overview.canvas;
    let isDown = false;
    const go = (event: PointerEvent) => {
      const [first, last] = view.extent, [from, to] = view.window, at = first + ((event.offsetX - LEFT) / (this.overview.width - LEFT - RIGHT)) * (last - first);
      view.zoom(at - (to - from) / 2, at + (to - from) / 2);
      view.changed();
    };
    canvas.addEventListener("pointerdown", (event) => { if (!view.dev?.n) return; isDown = true; canvas.setPointerCapture(event.pointerId); go(event); });
    canvas.addEventListener("pointermove", (event) => { if (isDown) go(event); });
    for (const end of ["pointerup", "pointercancel"] as const) canvas.addEventListener(end, () => (isDown = false));
  }
  private listenGrip() {
    const { view, grip } = this;
    let from: [number, number] | null = null;
    const set = (height: number) => { view.resize(height); view.changed(); };
    grip.addEventListener("pointerdown", (event) => { from = [event.clientY, view.height]; grip.setPointerCapture(event.pointerId); });
    grip.addEventListener("pointermove", (event) => { if (from) set(from[1] + event.clientY - from[0]); });
    for (const end of ["pointerup", "pointercancel"] as const) grip.addEventListener(end, () => (from = null));
    grip.addEventListener("keydown", (event) => {
      const by = event.key === "ArrowDown" ? 24 : event.key === "ArrowUp" ? -24 : 0;
      if (!by) return;
      set(view.height + by);
      event.preventDefault();
      event.stopPropagation();
    });
  }
  zoomAt(at: number, factor: number) {
    const { view } = this, [from, to] = view.window;
    view.zoom(at - (at - from) * factor, at + (to - at) * factor);
    view.changed();
  }
  /** Zooms where the pointer is, otherwise at the cursor, otherwise in the middle. */
  zoom(factor: number) {
    const { view } = this, [from, to] = view.window, at = this.hover ? this.position(this.hover.x) : view.dev?.n ? view.cursorPlace : from;
    this.zoomAt(at >= from && at <= to ? at : (from + to) / 2, factor);
  }
  /** The part of the height that a pixel is at. */
  private heightAt(y: number): number {
    const [low, high] = this.view.rise;
    return low + Math.min(1, Math.max(0, (TOP + this.plot - y) / this.plot)) * (high - low);
  }
  /** Zooms the height where the pointer is, or in what is selected, or in the middle. */
  raise(factor: number) {
    const { view, shown } = this, outline = view.picked && view.picked.block >= 0 && shown ? this.outlineOf(view.picked.block, shown) : [];
    const middle = outline.length ? shown!.low / shown!.whole + (1 - (outline[1] + outline[2]) / 2 / (this.plot * this.picture.ratio)) * (view.rise[1] - view.rise[0]) : null;
    view.raise(this.hover ? this.heightAt(this.hover.y) : middle ?? (view.rise[0] + view.rise[1]) / 2, factor);
    view.changed();
  }
  pan(by: number) {
    const { view } = this, [from, to] = view.window;
    view.zoom(from + by, to + by);
    view.changed();
  }
  /** Zooms to the part that is chosen, or to the life of what is selected. */
  zoomToSelection() {
    const { view } = this, device = view.dev, { marked } = view, life = marked ? [marked.from, marked.to ?? marked.from] : view.picked?.span;
    if (!device?.n) return;
    const [from, to] = view.span ?? (life ? life.map((at) => this.place(Math.min(at, view.trace.head.duration_ns))) : view.window), around = view.span ? 0 : Math.max((to - from) / 12, 1e-9);
    view.zoom(from - around, to + around);
    view.changed();
  }
  private key(event: KeyboardEvent) {
    const { view } = this, device = view.dev;
    if (!device?.n || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Home") this.move(0);
    else if (event.key === "End") this.move(device.n - 1);
    else if (event.key === "Enter") this.largest();
    else return;
    event.preventDefault();
  }
  /** Selects the largest block at the cursor; pressed again, the next smaller. */
  private largest() {
    const { view } = this, device = view.dev!, { blocks } = device.rectangles(), at = device.times[view.cursor], there: number[] = [];
    for (let i = 0; i < blocks.n && blocks.from[i] <= at; i++) if (blocks.to[i] > at && !isRest(view.trace.holders[blocks.what[i]].level)) there.push(i);
    there.sort((a, b) => blocks.bytes[b] - blocks.bytes[a] || a - b);
    const block = there[there.indexOf(view.picked?.block ?? -1) + 1] ?? there[0];
    if (block !== undefined) view.select({ kind: "block", from: blocks.from[block], addr: blocks.addr[block] });
  }
  /** Moves the cursor, and what is seen with it. */
  move(state: number) {
    const { view } = this;
    view.put(state);
    if (view.moment !== "base") view.moment = "cursor";
    const at = view.at(view.cursor), [from, to] = view.window;
    if (at < from || at > to) view.zoom(at - (to - from) / 2, at + (to - from) / 2);
    view.changed();
  }
  /** The next mark of a kind behind the cursor, or the first; with -1 the one before, or the last. */
  next(kind: string, by: 1 | -1 = 1) {
    const { view } = this, list: Mark[] = view.trace.marks.get(kind)?.list ?? [];
    if (!list.length || !view.dev?.n) return;
    const state = (mark: Mark) => Math.max(0, view.dev!.at(mark.from));
    const mark = by > 0 ? list.find((mark) => state(mark) > view.cursor) ?? list[0] : list.findLast((mark) => state(mark) < view.cursor) ?? list[list.length - 1];
    if (SELF.includes(kind)) [view.pick, view.isAlone] = [{ kind: "mark", of: kind, from: mark.from }, false];
    this.move(state(mark));
  }
}
