// What is looked at: kept in the address behind #, so that a link shows the same.
import { GROUPINGS, HOST, type Chapter, type Device, type Grouping } from "./model";
import type { Data } from "./data";
import { upTo } from "./pyramid";
import { lit, search, type Search } from "./search";

export const TABS = ["live", "map", "settings", "ranks", "tables"] as const;
export type Tab = (typeof TABS)[number];
export const MOMENTS = ["cursor", "peak", "end", "range", "grew", "base"] as const;
export type Moment = (typeof MOMENTS)[number];

export class View {
  /** The trace that is shown where a link names none. */
  first = 0;
  chapter = 0;
  device = 0;
  by: Grouping = "owner";
  tab: Tab = "live";
  moment: Moment = "cursor";
  /** The state that the cursor is on. */
  cursor = 0;
  base: number | null = null;
  range: [number, number] | null = null;
  /** The part of the axis that is seen. */
  window: [number, number] = [0, 1];
  axis: "time" | "change" = "time";
  only: string | null = null;
  search: Search = search("");
  private listeners: (() => void)[] = [];
  private link: ReturnType<typeof setTimeout> | null = null;
  private sum: [boolean[], Device, Float64Array] | null = null;
  private nReplaced = 0;
  private litFor: [Search, string, boolean[] | null] | null = null;

  constructor(readonly data: Data, readonly chapters: Chapter[]) {}

  get trace(): Chapter { return this.chapters[this.chapter]; }
  get dev(): Device | null { return this.trace.devices[this.device] ?? null; }
  get lit(): boolean[] | null {
    if (!this.litFor || this.litFor[0] !== this.search || this.litFor[1] !== this.reading) {
      this.litFor = [this.search, this.reading, lit(this.trace, this.search)];
    }
    return this.litFor[2];
  }
  /** Bytes that the search lights up, in each state. */
  get litBytes(): Float64Array | null {
    const { lit, dev } = this;
    if (!lit || !dev) return null;
    if (this.sum?.[0] !== lit || this.sum[1] !== dev) this.sum = [lit, dev, dev.sum((holder) => lit[holder])];
    return this.sum[2];
  }
  /** The cursor goes to where what the search lights up held most, if it held nothing where the cursor is. */
  toLit() {
    const sums = this.litBytes;
    if (!sums || sums[this.cursor]) return;
    const best = sums.reduce((best, bytes, state) => (bytes > sums[best] ? state : best), 0);
    if (sums[best]) [this.cursor, this.moment] = [best, "cursor"];
  }
  /** Where a state lies on the axis. */
  at(state: number): number {
    const device = this.dev!;
    return state < 0 ? 0 : this.axis === "time" ? device.times[state] : device.changes[state];
  }
  get positions(): Float64Array { return this.axis === "time" ? this.dev!.times : this.dev!.changes; }
  get extent(): [number, number] {
    const device = this.dev;
    if (!device || !device.n) return [0, 1];
    return this.axis === "time" ? [0, Math.max(this.trace.head.duration_ns, 1)] : [0, Math.max(device.head.n_changes, 1)];
  }
  on(listener: () => void) { this.listeners.push(listener); }
  changed() {
    this.listeners.forEach((listener) => listener());
    // Browsers take only so many changes of the address: while something moves, it follows.
    this.link ??= setTimeout(() => { this.link = null; history.replaceState(null, "", this.fragment()); }, 100);
  }
  /** What is looked at, and which reading of it: for what is made once for each. */
  get reading(): string { return [this.chapter, this.device, this.nReplaced].join(); }
  /** The same trace with more of its states: what was chosen in it stays where it was. */
  replace(index: number, chapter: Chapter) {
    const old = this.dev, isShown = index === this.chapter, change = (state: number) => old?.changes[Math.max(0, state)] ?? 0;
    const chosen = [this.cursor, this.base ?? 0, ...(this.range ?? [0, 0])].map(change);
    this.chapters[index] = chapter;
    this.nReplaced++;
    const device = this.dev;
    if (isShown && device) {
      const [cursor, base, from, to] = chosen.map((at) => Math.max(0, upTo(device.changes, at) - 1));
      this.cursor = cursor;
      if (this.base !== null) this.base = base;
      if (this.range) this.range = [from, to];
    }
    this.changed();
  }
  /** Another trace or device: what was chosen in the old one means nothing in it. */
  choose(chapter: number, device: number) {
    this.chapter = Math.min(Math.max(0, chapter), this.chapters.length - 1);
    const devices = this.trace.devices;
    // The host is not a device: it comes last.
    const most = (it: Device | undefined) => (!it || it.head.device === HOST ? 0 : it.total[it.peak] ?? 0);
    const busiest = devices.reduce((best, it, i) => (most(it) > most(devices[best]) ? i : best), 0);
    this.device = device >= 0 && device < devices.length ? device : busiest;
    [this.base, this.range, this.only] = [null, null, null];
    this.cursor = this.dev?.peak ?? 0;
    this.window = this.busy;
  }
  /** All of the axis, without a long time at its beginning in which next to nothing is held. */
  get busy(): [number, number] {
    const device = this.dev, [from, to] = this.extent;
    if (!device || !device.n || this.axis !== "time") return [from, to];
    const first = device.times[device.total.findIndex((total) => total * 50 >= device.total[device.peak])];
    return first > (to - from) / 4 ? [first - (to - first) / 12, to] : [from, to];
  }
  zoom(from: number, to: number) {
    const [first, last] = this.extent, least = this.axis === "time" ? 100 : 4;
    let size = Math.min(Math.max(to - from, least), last - first);
    const start = Math.min(Math.max(from, first), last - size);
    this.window = [start, start + size];
  }
  setAxis(axis: "time" | "change") {
    this.axis = axis;
    this.window = this.busy;
  }
  fragment(): string {
    const parts: Record<string, string> = { trace: String(this.chapter), device: String(this.device), by: this.by, tab: this.tab, moment: this.moment };
    if (this.dev) parts.change = String(this.dev.changes[this.cursor]);
    if (this.base !== null) parts.base = String(this.dev!.changes[this.base]);
    if (this.range) parts.range = this.range.map((state) => this.dev!.changes[Math.max(0, state)]).join("-");
    if (this.axis !== "time") parts.axis = this.axis;
    const [from, to] = this.busy;
    if (this.window[0] !== from || this.window[1] !== to) parts.window = this.window.map((at) => Math.round(at)).join("-");
    if (this.search.text) parts.search = this.search.text;
    if (this.only !== null) parts.only = this.only;
    return "#" + Object.entries(parts).map(([name, value]) => `${name}=${encodeURIComponent(value)}`).join("&");
  }
  /** Reads what a link says; what it does not say, or says wrongly, is as at the beginning. */
  restore(fragment: string) {
    const parts = new Map(fragment.replace(/^#/, "").split("&").map((part) => {
      const [name, value = ""] = part.split("=");
      try { return [name, decodeURIComponent(value)] as const; } catch { return [name, ""] as const; }
    }));
    const one = <T extends string>(name: string, of: readonly T[], otherwise: T) => of.find((it) => it === parts.get(name)) ?? otherwise;
    const number = (name: string) => (/^\d+$/.test(parts.get(name) ?? "") ? Number(parts.get(name)) : -1);
    const trace = number("trace");
    this.choose(trace >= 0 && trace < this.chapters.length ? trace : this.first, number("device"));
    this.by = one("by", GROUPINGS, "owner");
    this.tab = one("tab", TABS, "live");
    this.moment = one("moment", MOMENTS, "cursor");
    this.setAxis(one("axis", ["time", "change"] as const, "time"));
    this.search = search(parts.get("search") ?? "");
    this.only = parts.get("only") ?? null;
    const device = this.dev;
    if (!device || !device.n) return;
    const state = (change: number) => Math.max(0, Array.prototype.findLastIndex.call(device.changes, (at: number) => at <= change));
    if (number("change") >= 0) this.cursor = state(number("change"));
    if (number("base") >= 0) this.base = state(number("base"));
    const pair = (name: string) => { const m = /^(\d+)-(\d+)$/.exec(parts.get(name) ?? ""); return m && Number(m[1]) <= Number(m[2]) ? [Number(m[1]), Number(m[2])] as [number, number] : null; };
    const range = pair("range"), window = pair("window");
    if (range) this.range = [state(range[0]), state(range[1])];
    if (window && window[0] < window[1]) this.zoom(window[0], window[1]);
  }
  /** The states that are compared or shown: what is shown, and what it is compared with; in words. */
  shown(): { state: number; before: number | null; words: string } {
    const device = this.dev!, [from, to] = this.range ?? [0, device.n - 1];
    switch (this.moment) {
      case "peak": return { state: device.peak, before: null, words: "at the peak" };
      case "end": return { state: device.n - 1, before: null, words: "at the end" };
      case "range": return { state: device.highest.best(from, to + 1), before: null, words: this.range ? "at the highest instant of the range" : "at the peak (no range is chosen)" };
      case "grew": return { state: to, before: from, words: this.range ? "from the beginning to the end of the range" : "from the first to the last instant (no range is chosen)" };
      case "base": return { state: this.cursor, before: this.base ?? 0, words: this.base === null ? "from the first instant to the cursor (no base is set: B)" : "from the base to the cursor" };
      case "cursor": return { state: this.cursor, before: null, words: "at the cursor" };
    }
  }
}
