// What-ifs: what PyTorch reserved, beside what it would have reserved under other settings.
import { theme } from "./colours";
import { h, Picture } from "./dom";
import { axisLabels } from "./axis";
import { bytes, count, tickBytes, ticks } from "./format";
import { grid } from "./tables";
import type { SettingsHead } from "./data";
import type { View } from "./view";

const LEFT = 74, RIGHT = 12, TOP = 10, PLOT = 220;
const LINES = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#8c6bb1", "#7f9c3b", "#a6761d", "#999999"];

/** Points that fall on the same place of the axis become one, the highest: lines that rise and fall faster than that cover nothing. */
export function envelope(times: ArrayLike<number>, values: ArrayLike<number>, place: (at: number) => number): [number[], number[]] {
  const begins: number[] = [], highs: number[] = [];
  for (let i = 0; i < values.length; i++) {
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
    if (!head) {
      const most = "400,000";
      return this.body.replaceChildren(h("p", { class: "note" }, `No what-if is in this page: PyTorch made no requests on this device, or more than ${most}, or not all of them can be replayed. gputrace tune and gputrace replay say which.`));
    }
    const peak = view.data.column(head.reserved).reduce((a, b) => Math.max(a, b), 0), best = [...head.tried].filter((it) => !it.runs_out).sort((a, b) => a.peak_reserved_bytes - b.peak_reserved_bytes)[0];
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
    this.picture.redraw();
  }
  /** What needs much more than was recorded leaves the picture: what saves is what is looked for. */
  private top(head: SettingsHead): number {
    const recorded = this.view.data.column(head.reserved).reduce((a, b) => Math.max(a, b), 1);
    return Math.max(recorded, ...head.tried.map((it) => it.peak_reserved_bytes).filter((peak) => peak < recorded * 1.5)) * 1.1;
  }
  private draw(context: CanvasRenderingContext2D, width: number) {
    const { head, view } = this, colour = theme();
    if (!head) return;
    const times = view.data.column(head.time), column = (id: number) => view.data.column(id);
    const [from, to] = view.window, device = view.dev!, bottom = TOP + PLOT;
    const top = this.top(head);
    const along = (at: number) => LEFT + ((at - from) / (to - from || 1)) * (width - LEFT - RIGHT), x = (at: number) => along(device.place(view.axis, at)), y = (value: number) => bottom - (value / top) * PLOT;
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
    const trace = (values: ArrayLike<number>, isArea: boolean) => {
      context.beginPath();
      const [begins, highs] = envelope(times, values, (at) => Math.floor(x(at)));
      begins.forEach((begin, i) => {
        // Nothing was asked for after the last request: what becomes of the memory then, no setting decides.
        const next = i + 1 < begins.length ? begins[i + 1] : begin + 1;
        if (i === 0) context.moveTo(begin, isArea ? bottom : y(highs[0]));
        context.lineTo(begin, y(highs[i]));
        context.lineTo(next, y(highs[i]));
        if (i === begins.length - 1 && isArea) context.lineTo(next, bottom);
      });
    };
    trace(column(head.allocated), true);
    context.fillStyle = colour.line;
    context.fill();
    const line = (values: ArrayLike<number>, style: string, wide: number) => { trace(values, false); context.strokeStyle = style; context.lineWidth = wide; context.stroke(); };
    head.tried.forEach((it, i) => { if (!this.hidden.has(it.options) && !it.is_recorded) line(column(it.reserved), LINES[i % LINES.length], 1.5); });
    line(column(head.reserved), colour.ink, 2);
    context.restore();
  }
}
