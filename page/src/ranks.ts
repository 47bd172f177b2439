// All traces of the file side by side: small pictures on one scale, a heat map, and what is said of the job.
import { theme } from "./colours";
import { h, Picture } from "./dom";
import { bytes, tickTime, ticks } from "./format";
import type { Cell } from "./data";
import { HOST, type Chapter, type Device } from "./model";
import { upTo } from "./pyramid";
import { grid, section } from "./tables";
import type { View } from "./view";

const LEFT = 120, RIGHT = 12, ROW = 22, SMALL = 64;

export class Ranks {
  readonly element: HTMLElement;
  private heat: Picture;
  private small = h("div", { class: "small" });
  private body = h("div");
  private isMade = "";
  /** What the heat map was drawn for: all of the time, whatever part of it is looked at elsewhere. */
  private heated = "";
  constructor(private view: View) {
    this.heat = new Picture(this.rows.length * ROW + 24, "Heat map: how much each rank held over time. The table below has the peaks.", (context, width) => this.draw(context, width));
    this.heat.canvas.addEventListener("click", (event) => this.open(Math.floor(event.offsetY / ROW)));
    this.element = h("div", {}, h("h3", {}, this.scale()), this.heat.canvas, h("h3", {}, "On one scale"), this.small, this.body);
  }
  /** The device that each trace held most on. */
  private get rows(): [Chapter, Device][] {
    const most = (chapter: Chapter) => chapter.devices.filter((it) => it.head.device !== HOST).reduce<Device | null>((best, it) => ((it.total[it.peak] ?? 0) > (best?.total[best.peak] ?? -1) ? it : best), null);
    return this.view.chapters.map((chapter) => [chapter, most(chapter)] as const).filter((it): it is [Chapter, Device] => it[1] !== null);
  }
  private title(chapter: Chapter): string {
    const { rank, trace } = chapter.head.report;
    return rank === null ? trace.slice(trace.lastIndexOf("/") + 1) : `rank ${rank}`;
  }
  private scale(): string {
    const top = Math.max(...this.rows.map(([, device]) => device.total[device.peak] ?? 0), 0);
    return `Held over time: from nothing, pale, to ${bytes(top)}, dark`;
  }
  private open(row: number) {
    const found = this.rows[row];
    if (!found) return;
    this.view.choose(found[0].index, found[0].devices.indexOf(found[1]));
    this.view.changed();
  }
  /** How long all of them took together. */
  private get span(): number {
    return Math.max(...this.rows.map(([chapter]) => chapter.head.origin_ns + chapter.head.duration_ns), 1);
  }
  update() {
    const key = this.view.search.text, heated = [this.view.reading, theme().soft].join();
    if (heated !== this.heated) this.heat.redraw();
    this.heated = heated;
    if (this.isMade === "made" + key) return;
    this.isMade = "made" + key;
    const rows = this.rows, top = Math.max(...rows.map(([, device]) => device.total[device.peak] ?? 0), 1);
    this.small.replaceChildren(...rows.map(([chapter, device], i) => {
      const picture = new Picture(SMALL, `${this.title(chapter)}: at most ${bytes(device.total[device.peak] ?? 0)}`, (context, width) => this.line(context, width, device, chapter.head.duration_ns, top));
      return h("figure", {}, picture.canvas, h("figcaption", {}, h("button", { type: "button", class: "plain", onclick: () => this.open(i) }, this.title(chapter)), ` ${bytes(device.total[device.peak] ?? 0)}`));
    }));
    const processes = this.view.data.head.summary.processes;
    const table: Cell[][] = rows.map(([chapter, device]) => {
      const summary = processes[chapter.index]?.devices.find((it: any) => it.device === device.head.device);
      return [this.title(chapter), chapter.head.report.trace, device.head.name, { b: summary?.driver.peak_bytes ?? 0 }, { b: summary?.driver.live_bytes ?? 0 }, chapter.head.report.verdict?.section.title.replace("Verdict: ", "") ?? ""];
    });
    this.body.replaceChildren(
      grid({ name: "ranks", caption: "Traces of this file; each on the device that it held most on", columns: [["rank", "rank"], ["trace", "trace"], ["device", "device"], ["peak_bytes", "peak"], ["live_bytes", "live at end"], ["verdict", "verdict"]], rows: table, onRow: (row) => this.open(row) }, this.view.search.pattern),
      ...this.view.data.head.job.map((it) => section(it, this.view.search.pattern)));
  }
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
    context.textBaseline = "middle";
    rows.forEach(([chapter, device], row) => {
      context.fillStyle = chapter.index === this.view.chapter ? colour.accent : colour.soft;
      context.textAlign = "right";
      context.fillText(this.title(chapter).slice(-18), LEFT - 8, row * ROW + ROW / 2);
      const shift = chapter.head.origin_ns;
      for (let x = 0; x < plot; x++) {
        const at = (x / plot) * span - shift, next = ((x + 1) / plot) * span - shift;
        if (next < 0 || at > chapter.head.duration_ns) continue;
        const from = Math.max(0, upTo(device.times, at) - 1);
        if (device.times[from] > next) continue;
        const high = device.total[device.highest.best(from, Math.max(upTo(device.times, next), from + 1))];
        context.fillStyle = `rgb(${[[247, 8], [251, 48], [255, 107]].map(([pale, deep]) => Math.round(pale + (deep - pale) * (high / top))).join()})`;
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
    for (const at of marks) context.fillText(tickTime(at, marks.length > 1 ? marks[1] - marks[0] : span), Math.min(LEFT + (at / span) * plot, width - 24), rows.length * ROW + 4);
  }
}
