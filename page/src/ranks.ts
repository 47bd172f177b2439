// All traces of the file side by side: small pictures on one scale, a heat map, and what is said of the job.
import { isLight, theme } from "./colours";
import { fitted, h, Picture } from "./dom";
import { bytes, tickTime, ticks } from "./format";
import type { Cell } from "./data";
import { HOST, type Chapter, type Device } from "./model";
import { upTo } from "./pyramid";
import { grid, section } from "./tables";
import type { View } from "./view";

const LEFT = 150, RIGHT = 12, ROW = 22, SMALL = 64;

export class Ranks {
  readonly element: HTMLElement;
  private heat: Picture;
  private small = h("div", { class: "small" });
  private body = h("div");
  private isMade = "";
  private isAligned = false;
  /** What the heat map was drawn for: all of the time, whatever part of it is looked at elsewhere. */
  private heated = "";
  constructor(private view: View) {
    this.heat = new Picture(this.rows.length * ROW + 24, "Heat map: how much each rank held over time. The table below has the peaks.", (context, width) => this.draw(context, width));
    this.heat.canvas.addEventListener("click", (event) => this.open(Math.floor(event.offsetY / ROW)));
    // Traces that began far apart would leave each of them a few pixels.
    const origins = view.chapters.map((it) => it.head.origin_ns), longest = Math.max(...view.chapters.map((it) => it.head.duration_ns), 1);
    this.isAligned = Math.max(...origins) - Math.min(...origins) > longest;
    const align = h("button", { type: "button", "aria-pressed": this.isAligned, onclick: () => { this.isAligned = !this.isAligned; align.setAttribute("aria-pressed", String(this.isAligned)); this.update(); } }, "Align the starts");
    this.element = h("div", {}, h("h3", {}, this.scale()), view.chapters.length > 1 ? h("div", { class: "choices" }, align) : null, this.heat.canvas, h("h3", {}, "On one scale"), this.small, this.body);
  }
  /** Every device of every trace that held anything. */
  private get rows(): [Chapter, Device][] {
    return this.view.chapters.flatMap((chapter) => chapter.devices.filter((it) => it.head.device !== HOST && it.n).map((device): [Chapter, Device] => [chapter, device]));
  }
  private title(chapter: Chapter, device: Device): string {
    const { rank, trace } = chapter.head.report, who = rank === null ? trace.slice(trace.lastIndexOf("/") + 1) : `rank ${rank}`, n = chapter.devices.filter((it) => it.head.device !== HOST && it.n).length;
    return n < 2 ? who : (this.view.chapters.length > 1 ? who + ", " : "") + `cuda:${device.head.device}`;
  }
  /** When a trace begins on the axis: as the clocks say, or all at once. */
  private origin(chapter: Chapter): number { return this.isAligned ? 0 : chapter.head.origin_ns; }
  private scale(): string {
    const top = Math.max(...this.rows.map(([, device]) => device.total[device.peak] ?? 0), 0);
    return `Held over time: from nothing, faint, to ${bytes(top)}, strong`;
  }
  private open(row: number) {
    const found = this.rows[row];
    if (!found) return;
    this.view.open(found[0].index, found[0].devices.indexOf(found[1]));
  }
  /** How long all of them took together. */
  private get span(): number {
    return Math.max(...this.rows.map(([chapter]) => this.origin(chapter) + chapter.head.duration_ns), 1);
  }
  update() {
    const key = [this.view.search.text, this.view.chapter, this.view.device].join(), heated = [this.view.reading, this.isAligned, theme().soft].join();
    if (heated !== this.heated) this.heat.redraw();
    this.heated = heated;
    if (this.isMade === "made" + key) return;
    this.isMade = "made" + key;
    const rows = this.rows, top = Math.max(...rows.map(([, device]) => device.total[device.peak] ?? 0), 1);
    this.small.replaceChildren(...rows.map(([chapter, device], i) => {
      const picture = new Picture(SMALL, `${this.title(chapter, device)}: at most ${bytes(device.total[device.peak] ?? 0)}`, (context, width) => this.line(context, width, device, chapter.head.duration_ns, top));
      return h("figure", {}, picture.canvas, h("figcaption", {}, h("button", { type: "button", class: "plain", "aria-pressed": this.isShown(chapter, device), onclick: () => this.open(i) }, this.title(chapter, device)), ` ${bytes(device.total[device.peak] ?? 0)}`));
    }));
    const processes = this.view.data.head.summary.processes;
    const table: Cell[][] = rows.map(([chapter, device]) => {
      const summary = processes[chapter.index]?.devices.find((it: any) => it.device === device.head.device);
      return [this.title(chapter, device), chapter.head.report.trace, device.head.name, { b: summary?.driver.peak_bytes ?? 0 }, { b: summary?.driver.live_bytes ?? 0 }, chapter.head.report.verdict?.section.title.replace("Verdict: ", "") ?? ""];
    });
    this.body.replaceChildren(
      grid({ name: "ranks", caption: "Devices of the traces of this file", columns: [["rank", "rank"], ["trace", "trace"], ["device", "device"], ["peak_bytes", "peak"], ["live_bytes", "live at end"], ["verdict", "verdict"]], rows: table, onRow: (row) => this.open(row), isPicked: (row) => this.isShown(...rows[row]) }, this.view.search.pattern),
      ...this.view.data.head.job.map((it) => section(it, this.view.search.pattern)));
  }
  private isShown(chapter: Chapter, device: Device): boolean { return chapter.index === this.view.chapter && device.head.device === this.view.dev?.head.device; }
  private line(context: CanvasRenderingContext2D, width: number, device: Device, duration: number, top: number) {
    context.fillStyle = "#0072b2";
    for (let x = 0; x < width; x++) {
      const from = Math.max(0, upTo(device.times, (x / width) * duration) - 1), to = upTo(device.times, ((x + 1) / width) * duration);
      if (device.times[from] > ((x + 1) / width) * duration) continue;
      const high = device.total[device.highest.best(from, Math.max(to, from + 1))];
      context.fillRect(x, SMALL - (high / top) * (SMALL - 4), 1, (high / top) * (SMALL - 4));
    }
  }
  private draw(context: CanvasRenderingContext2D, width: number) {
    const rows = this.rows, colour = theme(), span = this.span, top = Math.max(...rows.map(([, device]) => device.total[device.peak] ?? 0), 1);
    const plot = width - LEFT - RIGHT;
    // What is nothing is close to the ground that it lies on.
    const ramp = isLight(colour.panel) ? [[232, 8], [240, 48], [247, 107]] : [[42, 126], [54, 203], [66, 255]];
    context.textBaseline = "middle";
    rows.forEach(([chapter, device], row) => {
      context.fillStyle = this.isShown(chapter, device) ? colour.ink : colour.soft;
      context.textAlign = "right";
      context.fillText(fitted(context, this.title(chapter, device), LEFT - 14), LEFT - 8, row * ROW + ROW / 2);
      if (this.isShown(chapter, device)) {
        context.strokeStyle = colour.ink;
        context.lineWidth = 1.5;
        context.strokeRect(LEFT - 1, row * ROW + 0.75, plot + 2, ROW - 1.5);
      }
      const shift = this.origin(chapter);
      for (let x = 0; x < plot; x++) {
        const at = (x / plot) * span - shift, next = ((x + 1) / plot) * span - shift;
        if (next < 0 || at > chapter.head.duration_ns) continue;
        const from = Math.max(0, upTo(device.times, at) - 1);
        if (device.times[from] > next) continue;
        const high = device.total[device.highest.best(from, Math.max(upTo(device.times, next), from + 1))];
        context.fillStyle = `rgb(${ramp.map(([faint, strong]) => Math.round(faint + (strong - faint) * (high / top))).join()})`;
        context.fillRect(LEFT + x, row * ROW + 1, 1, ROW - 2);
      }
      for (const oom of ["out of memory", "finding"].flatMap((kind) => chapter.marks.get(kind)?.list ?? [])) {
        context.fillStyle = colour.bad;
        context.fillRect(LEFT + ((oom.from + shift) / span) * plot - 1, row * ROW + 1, 2, ROW - 2);
      }
      for (const mark of chapter.marks.get("nccl")?.list ?? []) {
        if (mark.to !== null) continue;
        context.fillStyle = "#d55e00";
        const x = LEFT + ((mark.from + shift) / span) * plot;
        context.fillRect(x, row * ROW + ROW - 5, Math.max(2, LEFT + plot - x), 3);
      }
    });
    context.fillStyle = colour.soft;
    context.textAlign = "center";
    context.textBaseline = "top";
    const marks = ticks(0, span, 8, false);
    for (const at of marks) context.fillText(tickTime(at, marks.length > 1 ? marks[1] - marks[0] : span, span), Math.min(LEFT + (at / span) * plot, width - 24), rows.length * ROW + 4);
  }
}
