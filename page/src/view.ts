// What is looked at: kept in the address behind #, so that a link shows the same, and the browser's "back" goes back.
import { AXES, HOST, type Axis, type Chapter, type Device, type Grouping, type Mark } from "./model";
import type { Data } from "./data";
import { markOf, Picked, readPick, written, type Pick } from "./pick";
import { upTo } from "./pyramid";
import { lit, search, type Search } from "./search";

export const TABS = ["live", "map", "settings", "ranks", "tables"] as const;
export type Tab = (typeof TABS)[number];
export const MOMENTS = ["cursor", "peak", "end", "range", "grew", "base"] as const;
export type Moment = (typeof MOMENTS)[number];
/** What the picture over time is made of. */
export const DRAWN = ["blocks", "groups"] as const;
export type Drawn = (typeof DRAWN)[number];

/** How high the picture over time is: usually, twice as high, and between which heights. */
export const LOW = 264, TALL = 540, HEIGHTS: [number, number] = [96, 1600];

export class View {
  /** The trace that is shown where a link names none. */
  first = 0;
  chapter = 0;
  device = 0;
  by: Grouping = "owner";
  drawn: Drawn = "blocks";
  tab: Tab = "live";
  moment: Moment = "cursor";
  /** The state that the cursor is on, and where exactly the pointer put it. */
  cursor = 0;
  cursorAt: number | null = null;
  base: number | null = null;
  /** The part of the axis that is chosen. */
  span: [number, number] | null = null;
  /** The part of the axis that is seen. */
  window: [number, number] = [0, 1];
  axis: Axis = "time";
  /** The part of the height of the picture over time that is seen. */
  rise: [number, number] = [0, 1];
  only: string | null = null;
  /** The selection, and whether it alone is drawn over time. */
  pick: Pick | null = null;
  isAlone = false;
  hidesUnused = false;
  /** How high the picture over time is, and whether it stays in sight while the page is scrolled. */
  height = LOW;
  isPinned = false;
  /** Lines above what was handed out: the context, the driver's figure, the card. */
  hasLines = false;
  /** What the page opened on, in words; "" once something else is looked at. */
  caption = "";
  captionFor = "";
  search: Search = search("");
  /** Puts what the verdict needs in view; the part of the axis that it needs. */
  evidence: () => void = () => {};
  fit: [number, number] | null = null;
  private listeners: (() => void)[] = [];
  private link: ReturnType<typeof setTimeout> | null = null;
  private sum: [boolean[], Device, Float64Array] | null = null;
  private nReplaced = 0;
  private litFor: [Search, string, boolean[] | null] | null = null;
  private pickedFor: [Pick, string, Picked] | null = null;
  private pushed = "";

  constructor(readonly data: Data, readonly chapters: Chapter[]) {}

  get trace(): Chapter { return this.chapters[this.chapter]; }
  get dev(): Device | null { return this.trace.devices[this.device] ?? null; }
  get lit(): boolean[] | null {
    if (!this.litFor || this.litFor[0] !== this.search || this.litFor[1] !== this.reading) {
      this.litFor = [this.search, this.reading, lit(this.trace, this.search)];
    }
    return this.litFor[2];
  }
  /** The same; null where the search finds no holder, but marks or words: then nothing is faded. */
  get litHolders(): boolean[] | null { return this.lit?.includes(true) ? this.lit : null; }
  /** The selection, in what is shown. */
  get picked(): Picked | null {
    const { pick, dev, reading } = this;
    if (!pick || pick.kind === "mark" || !dev?.n) return null;
    if (this.pickedFor?.[0] !== pick || this.pickedFor[1] !== reading) this.pickedFor = [pick, reading, new Picked(pick, dev)];
    return this.pickedFor[2];
  }
  /** The mark that is selected. */
  get marked(): Mark | null { return markOf(this.pick, this.trace); }
  /** What finds the selected line in words: the search comes first. */
  get words(): RegExp | null {
    const { pick, search: { pattern } } = this, text = pick?.kind === "line" ? pick.text : this.marked?.text, place = /[^/()]+:\d+(?=\))/.exec(text ?? "")?.[0];
    return pattern ?? (place ? new RegExp(place.replace(/[.*+?^${}()|[\]\\]/g, "\\$&") + "\\)") : null);
  }
  /** Selects something; `null` nothing. */
  select(pick: Pick | null) {
    this.pick = pick;
    if (!pick || pick.kind === "mark") this.isAlone = false;
    this.changed();
  }
  /** What the caption is true of. */
  get captioned(): string { return [this.picking, this.axis, this.reading].join(); }
  /** For what is made once for each selection. */
  get picking(): string { return this.pick ? written(this.pick) + this.isAlone : ""; }
  /** Bytes that the search lights up, in each state. */
  get litBytes(): Float64Array | null {
    const { lit, dev } = this;
    if (!lit || !dev) return null;
    if (this.sum?.[0] !== lit || this.sum[1] !== dev) this.sum = [lit, dev, dev.sum((holder) => lit[holder])];
    return this.sum[2];
  }
  /** The cursor goes to where these bytes are highest, if they are nothing where the cursor is. */
  toHighest(sums: Float64Array | null) {
    if (!sums || sums[this.cursor]) return;
    const best = sums.reduce((best, bytes, state) => (bytes > sums[best] ? state : best), 0);
    if (sums[best]) { this.put(best); this.moment = "cursor"; }
  }
  /** The cursor goes to a state; `at` is where on the axis it was put. */
  put(state: number, at: number | null = null) {
    this.cursor = Math.min(Math.max(0, state), Math.max(0, this.dev!.n - 1));
    this.cursorAt = at;
  }
  /** Where the cursor is on the axis. */
  get cursorPlace(): number { return this.cursorAt ?? this.at(this.cursor); }
  /** When that is. */
  get cursorTime(): number { return this.axis === "time" && this.cursorAt !== null ? this.cursorAt : this.dev!.times[this.cursor]; }
  /** The first and the last state of the part that is chosen. */
  get range(): [number, number] | null {
    const { span, dev } = this;
    if (!span || !dev?.n) return null;
    return span.map((at) => Math.max(0, dev.at0(this, at))) as [number, number];
  }
  /** Where a state lies on the axis. */
  at(state: number): number { return state < 0 ? Math.min(0, this.extent[0]) : this.positions[state]; }
  get positions(): Float64Array { return this.dev!.positionsOn(this.axis); }
  get extent(): [number, number] {
    const device = this.dev, { steps } = this.trace;
    if (!device || !device.n) return [0, 1];
    if (this.axis === "step") return [steps[0].from > 0 ? -1 : 0, steps.length + 1];
    return this.axis === "time" ? [0, Math.max(this.trace.head.duration_ns, 1)] : [0, Math.max(device.head.n_changes, 1)];
  }
  /** The axes that this trace can be drawn on. */
  get axes(): Axis[] { return AXES.filter((axis) => axis !== "step" || this.trace.steps.length > 0); }
  on(listener: () => void) { this.listeners.push(listener); }
  changed() {
    this.listeners.forEach((listener) => listener());
    // Browsers take only so many changes of the address: while something moves, it follows. What is selected and which view is open
    // are steps to go back to.
    this.link ??= setTimeout(() => {
      this.link = null;
      const step = [this.chapter, this.device, this.tab, this.picking].join(), isStep = this.pushed !== "" && step !== this.pushed;
      this.pushed = step;
      if (location.hash !== this.fragment()) history[isStep ? "pushState" : "replaceState"](null, "", this.fragment());
    }, 100);
  }
  /** What is looked at, and which reading of it: for what is made once for each. */
  get reading(): string { return [this.chapter, this.device, this.nReplaced].join(); }
  /** The same trace with more of its states: what was chosen in it stays where it was. */
  replace(index: number, chapter: Chapter) {
    const old = this.dev, isShown = index === this.chapter, change = (state: number) => old?.changes[Math.max(0, state)] ?? 0;
    const chosen = [this.cursor, this.base ?? 0].map(change);
    this.chapters[index] = chapter;
    this.nReplaced++;
    const device = this.dev;
    if (isShown && device) {
      const [cursor, base] = chosen.map((at) => Math.max(0, upTo(device.changes, at) - 1));
      this.cursor = cursor;
      if (this.base !== null) this.base = base;
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
    [this.base, this.span, this.only, this.pick, this.isAlone, this.fit, this.caption] = [null, null, null, null, false, null, ""];
    this.rise = [0, 1];
    if (!this.axes.includes(this.axis)) this.axis = "time";
    if (!this.trace.groupings.includes(this.by)) this.by = "owner";
    this.cursor = this.dev?.peak ?? 0;
    this.cursorAt = null;
    this.window = this.busy;
  }
  /** The same as somebody's choice: another trace is shown as its verdict needs it, in the view that is open. */
  open(chapter: number, device: number) {
    const { tab } = this, isSame = chapter === this.chapter;
    this.choose(chapter, device);
    if (!isSame) this.evidence();
    this.tab = tab;
    this.changed();
  }
  /** All of the axis, without a long time at its beginning in which next to nothing is held, or at its end in which nothing changes. */
  get busy(): [number, number] {
    const device = this.dev, [from, to] = this.extent;
    if (!device || !device.n || this.axis !== "time") return [from, to];
    const first = device.times[device.total.findIndex((total) => total * 50 >= device.total[device.peak])], last = device.times[device.n - 1];
    const begin = first > (to - from) / 4 ? first - (to - first) / 12 : from;
    return [begin, to - last > (to - begin) / 4 ? last + (last - begin) / 12 : to];
  }
  zoom(from: number, to: number) {
    const [first, last] = this.extent, least = this.axis === "time" ? 100 : this.axis === "step" ? 0.01 : 4;
    const size = Math.min(Math.max(to - from, least), last - first);
    const start = Math.min(Math.max(from, first), last - size);
    this.window = [start, start + size];
  }
  /** Makes the picture over time so high. */
  resize(height: number) { this.height = Math.round(Math.min(HEIGHTS[1], Math.max(HEIGHTS[0], height))); }
  /** Zooms the height: `at` stays where it is. */
  raise(at: number, factor: number) {
    const [low, high] = this.rise, size = Math.min(1, Math.max(1e-5, (high - low) * factor)), from = Math.min(1 - size, Math.max(0, at - ((at - low) / (high - low)) * size));
    this.rise = [from, from + size];
  }
  setAxis(axis: Axis) {
    const device = this.dev, isSame = axis === this.axis;
    const times = !isSame && device?.n ? [this.cursorTime, ...(this.span ?? [])].map((at, i) => (i && this.axis !== "time" ? device.times[Math.max(0, device.at0(this, at))] : at)) : [];
    this.axis = this.axes.includes(axis) ? axis : "time";
    this.window = this.busy;
    if (isSame) return;
    this.cursorAt = null;
    [this.fit, this.span] = [null, this.span && device ? [device.place(this.axis, times[1]), device.place(this.axis, times[2])] : null];
  }
  fragment(): string {
    const parts: Record<string, string> = { trace: String(this.chapter), device: String(this.device), by: this.by, tab: this.tab, moment: this.moment };
    if (this.dev?.n) parts.change = String(this.dev.changes[this.cursor]);
    if (this.base !== null) parts.base = String(this.dev!.changes[this.base]);
    if (this.axis !== "time") parts.axis = this.axis;
    const pair = ([from, to]: [number, number]) => [from, to].map((at) => (this.axis === "step" ? at.toFixed(3) : Math.round(at))).join("_");
    if (this.span) parts.range = pair(this.span);
    if (pair(this.window) !== pair(this.busy)) parts.window = pair(this.window);
    if (this.rise[1] - this.rise[0] < 1) parts.rise = this.rise.map((at) => at.toFixed(6)).join("_");
    if (this.drawn !== "blocks") parts.draw = this.drawn;
    if (this.hidesUnused) parts.unused = "hidden";
    if (this.height !== LOW) parts.height = String(this.height);
    if (this.isPinned) parts.pinned = "yes";
    if (this.hasLines) parts.lines = "all";
    if (this.search.text) parts.search = this.search.text;
    if (this.only !== null) parts.only = this.only;
    if (this.pick) parts.pick = written(this.pick);
    if (this.isAlone) parts.alone = "yes";
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
    const trace = number("trace"), isLink = trace >= 0 && trace < this.chapters.length;
    this.choose(isLink ? trace : this.first, number("device"));
    [this.by, this.tab, this.moment, this.drawn, this.hidesUnused, this.hasLines, this.search] = ["owner", "live", "cursor", "blocks", false, false, search("")];
    this.setAxis("time");
    if (!isLink) return this.evidence();
    this.by = one("by", this.trace.groupings, this.by);
    this.tab = one("tab", TABS, this.tab);
    this.moment = one("moment", MOMENTS, this.moment);
    this.setAxis(one("axis", AXES, this.axis));
    this.drawn = one("draw", DRAWN, this.drawn);
    this.hidesUnused = parts.get("unused") === "hidden";
    this.resize(number("height") > 0 ? number("height") : LOW);
    this.isPinned = parts.get("pinned") === "yes";
    this.hasLines = parts.get("lines") === "all";
    this.search = search(parts.get("search") ?? "");
    this.only = parts.get("only") ?? null;
    this.pick = readPick(parts.get("pick"));
    this.isAlone = this.pick !== null && this.pick.kind !== "mark" && parts.get("alone") === "yes";
    const device = this.dev;
    if (!device || !device.n) return;
    const state = (change: number) => Math.max(0, upTo(device.changes, change) - 1);
    if (number("change") >= 0) this.cursor = state(number("change"));
    if (number("base") >= 0) this.base = state(number("base"));
    const pair = (name: string): [number, number] | null => {
      const found = /^(-?\d+(?:\.\d+)?)_(-?\d+(?:\.\d+)?)$/.exec(parts.get(name) ?? "");
      return found && Number(found[1]) <= Number(found[2]) ? [Number(found[1]), Number(found[2])] : null;
    };
    const window = pair("window"), rise = pair("rise");
    if (rise && rise[0] >= 0 && rise[1] <= 1 && rise[0] < rise[1]) this.rise = rise;
    this.span = pair("range");
    if (window && window[0] < window[1]) this.zoom(window[0], window[1]);
  }
  /** The states that are compared or shown: what is shown, and what it is compared with; in words. */
  shown(): { state: number; before: number | null; words: string } {
    const device = this.dev!, { range } = this, [from, to] = range ?? [0, device.n - 1];
    switch (this.moment) {
      case "peak": return { state: device.peak, before: null, words: "at the peak" };
      case "end": return { state: device.n - 1, before: null, words: "at the end" };
      case "range": return { state: device.highest.best(from, to + 1), before: null, words: range ? "at the highest instant of the range" : "at the peak (no range is chosen)" };
      case "grew": return { state: to, before: from, words: range ? "from the beginning to the end of the range" : "from the first to the last instant (no range is chosen)" };
      case "base": return { state: this.cursor, before: this.base ?? 0, words: this.base === null ? "from the first instant to the cursor (no base is set: B)" : "from the base to the cursor" };
      case "cursor": return { state: this.cursor, before: null, words: "at the cursor" };
    }
  }
}
