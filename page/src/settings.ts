// What-ifs: what PyTorch reserved, beside what it would have reserved under other settings.
import { theme } from "./colours";
import { h, Picture } from "./dom";
import { axisLabels } from "./axis";
import { bytes, count, tickBytes, ticks } from "./format";
import { upTo } from "./pyramid";
import { grid } from "./tables";
import type { SettingsHead } from "./data";
import type { View } from "./view";

const LEFT = 74, RIGHT = 12, TOP = 10, PLOT = 220;
const LINES = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#8c6bb1", "#7f9c3b", "#a6761d", "#999999"];

/** Points that fall on the same place of the axis become one, the highest: lines that rise and fall faster than that cover nothing. `first`
 * and `end` bound the points that are seen. */
export function envelope(times: ArrayLike<number>, values: ArrayLike<number>, place: (at: number) => number, first = 0, end = values.length): [number[], number[]] {
  const begins: number[] = [], highs: number[] = [];
  for (let i = first; i < end; i++) {
    const at = place(times[i]), last = begins.length - 1;
    if (last >= 0 && begins[last] === at) highs[last] = Math.max(highs[last], values[i]);
    else { begins.push(at); highs.push(values[i]); }
  }
  return [begins, highs];
}

export class SettingsView {
  readonly element: HTMLElement;
  private picture: Picture;
  private body = h("div");
  private hidden = new Set<string>();
  /** What the table and the heading were made for. */
  private made = "";
  /** Where the points lie on the axis. */
  private points: { key: string; places: Float64Array; peak: number } | null = null;
  constructor(private view: View) {
    this.picture = new Picture(TOP + PLOT + 22, "What PyTorch reserved over time, recorded and under other settings. The table below has the peaks.", (context, width) => this.draw(context, width));
    this.element = h("div", {}, this.body);
  }
  private get head(): SettingsHead | null {
    const { view } = this;
    return view.trace.head.settings.find((it) => it.device === view.dev?.head.device) ?? null;
  }
  update() {
    const { head, view } = this;
    this.picture.redraw();
    const made = [view.reading, view.search.text, [...this.hidden].join(), theme().ink].join("|");
    if (made === this.made) return;
    this.made = made;
    if (!head) {
      const most = "400,000";
      return this.body.replaceChildren(h("p", { class: "note" }, `No what-if is in this page: PyTorch made no requests on this device, or more than ${most}, or not all of them can be replayed. gputrace tune and gputrace replay say which.`));
    }
    const { peak } = this.placed(head), best = [...head.tried].filter((it) => !it.runs_out).sort((a, b) => a.peak_reserved_bytes - b.peak_reserved_bytes)[0];
    const saves = best && best.peak_reserved_bytes < peak ? `${best.options || "the default"} would have reserved ${bytes(best.peak_reserved_bytes)} instead of ${bytes(peak)}` : `none of these settings would have reserved less than the ${bytes(peak)} that were`;
    this.body.replaceChildren(
      h("h3", {}, `The same requests under other settings: ${saves}`),
      head.doubt ? h("p", { class: "warning" }, `A guess: ${head.doubt}`) : "",
      this.picture.canvas,
      grid({
        name: "settings", caption: "Settings of PYTORCH_CUDA_ALLOC_CONF, replayed without a limit of memory",
        columns: [["options", "setting"], ["peak_reserved_bytes", "reserved at most"], ["change", "than recorded"], ["note", ""]],
        rows: head.tried.map((it) => [it.options || "(none)", { b: it.peak_reserved_bytes }, { d: it.peak_reserved_bytes - peak }, [it.is_recorded ? "as recorded" : "", it === best && it.peak_reserved_bytes < peak ? "reserves least" : "", it.runs_out ? "runs out" : "", this.hidden.has(it.options) ? "hidden" : ""].filter(Boolean).join(", ")]),
        swatch: (row) => (head.tried[row].is_recorded ? theme().ink : LINES[row % LINES.length]),
        isPicked: (row) => head.tried[row] === best && best.peak_reserved_bytes < peak,
        onRow: (row) => { const name = head.tried[row].options; if (!this.hidden.delete(name)) this.hidden.add(name); this.update(); },
      }, view.search.pattern),
      h("p", { class: "note" }, "The area: in blocks. The thick line: reserved, as recorded. A click on a setting hides or shows its line. gputrace tune tries more, and says how sure each is."),
      head.tried.some((it) => it.peak_reserved_bytes > this.top(head)) ? h("p", { class: "note" }, "Lines that leave the picture at its top need more than it shows.") : "",
      head.stretch > 1 ? h("p", { class: "note" }, `Each point is the highest of ${count(head.stretch)} requests, and of those that fall on one place of the axis.`) : "");
  }
  private placed(head: SettingsHead) {
    const { view } = this, key = [view.reading, view.axis].join();
    if (this.points?.key !== key) {
      const places = Float64Array.from(view.data.column(head.time), (at) => view.dev!.place(view.axis, at));
      this.points = { key, places, peak: view.data.column(head.reserved).reduce((a, b) => Math.max(a, b), 0) };
    }
    return this.points;
  }
  /** What needs much more than was recorded leaves the picture: what saves is what is looked for. */
  private top(head: SettingsHead): number {
    const recorded = Math.max(1, this.placed(head).peak);
    return Math.max(recorded, ...head.tried.map((it) => it.peak_reserved_bytes).filter((peak) => peak < recorded * 1.5)) * 1.1;
  }
  private draw(context: CanvasRenderingContext2D, width: number) {
    const { head, view } = this, colour = theme();
    if (!head) return;
    const { places } = this.placed(head), column = (id: number) => view.data.column(id);
    const [from, to] = view.window, bottom = TOP + PLOT;
    const top = this.top(head);
    // The last point before the window reaches into it.
    const first = Math.max(0, upTo(places, from) - 1), end = Math.min(places.length, upTo(places, to) + 1);
    const along = (at: number) => LEFT + ((at - from) / (to - from || 1)) * (width - LEFT - RIGHT), y = (value: number) => bottom - (value / top) * PLOT;
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (const at of ticks(0, top, 5, true)) {
      context.fillStyle = colour.line;
      context.fillRect(LEFT, Math.round(y(at)), width - LEFT - RIGHT, 1);
      context.fillStyle = colour.soft;
      context.fillText(tickBytes(at), LEFT - 8, y(at));
    }
    context.textAlign = "center";
    context.textBaseline = "top";
    for (const [at, text] of axisLabels(view, width)) { const half = context.measureText(text).width / 2 + 2; context.fillText(text, Math.max(half, Math.min(along(at), width - half)), bottom + 6); }
    context.save();
    context.beginPath();
    context.rect(LEFT, 0, width - LEFT - RIGHT, bottom);
    context.clip();
    // Rectangles and not a path: lines rise and fall in almost every pixel, and stroking thousands of corners takes most of a frame.
    const steps = (values: ArrayLike<number>, each: (begin: number, next: number, high: number, before: number) => void) => {
      const [begins, highs] = envelope(places, values, (at) => Math.floor(along(at)), first, end);
      for (let i = 0; i < begins.length; i++) {
        const begin = i, before = highs[Math.max(0, i - 1)];
        while (i + 1 < begins.length && highs[i + 1] === highs[begin]) i++;
        // Nothing was asked for after the last request: what becomes of the memory then, no setting decides.
        each(begins[begin], i + 1 < begins.length ? begins[i + 1] : begins[i] + 1, y(highs[begin]), y(before));
      }
    };
    context.fillStyle = colour.line;
    steps(column(head.allocated), (begin, next, high) => context.fillRect(begin, high, next - begin, bottom - high));
    const line = (values: ArrayLike<number>, style: string, wide: number) => {
      context.fillStyle = style;
      steps(values, (begin, next, high, before) => {
        context.fillRect(begin - wide / 2, high - wide / 2, next - begin + wide, wide);
        if (before !== high) context.fillRect(begin - wide / 2, Math.min(high, before), wide, Math.abs(high - before));
      });
    };
    head.tried.forEach((it, i) => { if (!this.hidden.has(it.options) && !it.is_recorded) line(column(it.reserved), LINES[i % LINES.length], 1.5); });
    line(column(head.reserved), colour.ink, 2);
    context.restore();
  }
}
