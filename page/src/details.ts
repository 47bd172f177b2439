// Where `gputrace serve` shows the page, all of the part that is looked at can be had: it is asked for when one has come to rest.
import { opened } from "./data";
import { Chapter } from "./model";
import type { View } from "./view";

/** So long nothing moves before it is asked, in milliseconds. */
const REST = 400;

export class Details {
  private address = document.querySelector("meta[name=gputrace-details]")?.getAttribute("content") ?? null;
  private timer: ReturnType<typeof setTimeout> | null = null;
  private isAsking = false;
  /** What there was no room for: only a much smaller part is asked for again. */
  private tooLarge = Infinity;
  constructor(private view: View, private say: (words: string) => void) {
    if (this.address) view.on(() => this.look());
  }
  /** The part that is looked at, in time; none where all of it is there, or next to nothing is left out. */
  private get wanted(): [number, number] | null {
    const { view } = this, device = view.dev;
    if (!device?.n || (device.head.stretch === 1 && !device.head.blocks.n_tiled)) return null;
    const time = (at: number) => device.times[Math.max(0, device.at0(view, at))];
    const [from, to] = view.axis === "time" ? view.window : [time(view.window[0]), time(view.window[1])], { whole } = device.head;
    const isThere = whole !== null && whole[0] <= from && whole[1] >= Math.min(to, view.trace.head.duration_ns);
    return isThere || to - from > Math.min(view.trace.head.duration_ns, this.tooLarge) / 2 ? null : [from, to];
  }
  private look() {
    if (this.timer) clearTimeout(this.timer);
    this.timer = this.wanted && !this.isAsking ? setTimeout(() => void this.ask(), REST) : null;
  }
  private async ask() {
    const { view, wanted } = this, { chapter } = view, old = view.chapters[chapter];
    if (!wanted) return;
    this.isAsking = true;
    this.say("reading this part of the trace\u2026");
    const around = (wanted[1] - wanted[0]) / 2, from = Math.max(0, Math.floor(wanted[0] - around)), to = Math.ceil(wanted[1] + around);
    try {
      const response = await fetch(`${this.address}?trace=${chapter}&from=${from}&to=${to}`);
      if (!response.ok) throw new Error(`${response.status} ${response.statusText}`);
      const data = opened(new Uint8Array(await response.arrayBuffer())), [head] = data.head.chapters;
      const { report, settings, origin_ns, findings } = old.head;
      view.replace(chapter, new Chapter({ ...head, report, settings, origin_ns, findings }, data, chapter));
      if (view.trace.devices.some((device) => device.head.stretch > 1 && !device.head.whole)) this.tooLarge = to - from;
      this.say("");
    } catch (error) {
      this.tooLarge = to - from;
      this.say(`no more detail: ${String((error as Error).message)}`);
    }
    this.isAsking = false;
    this.look();
  }
}
