// The pane beside the pictures: all that is known of the selection, and the events around the cursor.
import { copied, h, shortSite } from "./dom";
import { EVENT, eventAt, events, type Events } from "./events";
import { bytes, count, time } from "./format";
import { HOST, isRest, LEVEL, NO_LAYER, type Device, type Grouping, type Mark } from "./model";
import { markTitle, type Picked, type Pick } from "./pick";
import { upTo } from "./pyramid";
import type { Timeline } from "./timeline";
import type { View } from "./view";

/** Events that are listed at once. */
const ROWS = 15;
/** Stacks of a selection that are shown: those that hold most. */
const MOST_STACKS = 4;

export class Pane {
  readonly element: HTMLElement;
  private body = h("div", { class: "selection", "aria-live": "polite" });
  private list = h("div", { class: "events", role: "group", "aria-label": "Events around the cursor" });
  private made = "";
  private listed = "";
  /** The event that the cursor is on, where keys moved it there. */
  private current: { device: Device; at: number } | null = null;
  private isReady = false;
  private pickedFor: string | null = null;
  constructor(private view: View, private timeline: Timeline) {
    this.element = h("aside", { class: "pane", tabindex: 0, "aria-label": "Selection and events" }, this.body, this.list);
    this.list.addEventListener("wheel", (event) => { event.preventDefault(); this.step(Math.sign(event.deltaY) * 3, false); }, { passive: false });
    // The list is made once the pictures are there.
    setTimeout(() => { this.isReady = true; this.events(); }, 60);
  }
  update() {
    const { view } = this, { picked } = view, key = [view.reading, view.picking, view.cursor, view.axis, view.by].join();
    this.element.classList.toggle("empty", !view.pick);
    if (view.picking !== this.pickedFor) {
      // On a narrow screen what the page opens on leaves room for the pictures.
      this.element.classList.toggle("folded", this.pickedFor === null);
      this.pickedFor = view.picking;
    }
    if (key !== this.made) {
      this.made = key;
      const { marked } = view;
      this.body.replaceChildren(...(picked ? this.selection(shortSite(picked.title), picked.block >= 0 ? this.block(picked) : this.several(picked)) : marked ? this.selection(shortSite(markTitle(marked)), this.mark(marked)) : [h("h2", {}, "Selection"), h("p", { class: "note" }, "Click a block, a row, a frame, a segment or a step: every view outlines it, and its whole stack is here. Enter selects the largest block at the cursor.")]));
    }
    this.events();
  }
  private selection(title: string, parts: HTMLElement[]): HTMLElement[] {
    const { view } = this, close = h("button", { type: "button", class: "plain close", "aria-label": "Clear the selection", title: "Clear the selection (Esc)", onclick: () => view.select(null) }, "\u2715");
    const fold = h("button", { type: "button", class: "fold", onclick: () => this.element.classList.toggle("folded") }, "Details");
    return [h("h2", { class: "picked" }, h("span", {}, title), fold, close), ...parts];
  }
  private act(words: string, act: () => void, isPressed?: boolean, title?: string): HTMLElement {
    return h("button", { type: "button", title, "aria-pressed": isPressed, onclick: act }, words);
  }
  private facts(list: [string, string | Node | null][]): HTMLElement {
    return h("dl", {}, ...list.filter(([, value]) => value !== null && value !== "").flatMap(([label, value]) => [h("dt", {}, label), h("dd", {}, value)]));
  }
  private when(at: number): string {
    const step = this.view.trace.steps.find((it) => it.from <= at && (it.to ?? Infinity) >= at);
    return time(Math.round(at)) + (step ? `, ${step.text}` : "");
  }
  private block(picked: Picked): HTMLElement[] {
    const { view } = this, device = view.dev!, map = device.rectangles(), { blocks, grounds } = map, i = picked.block, holder = view.trace.holders[blocks.what[i]];
    const [from, to, size, spare] = [blocks.from[i], blocks.to[i], blocks.bytes[i], blocks.spare[i]], isKept = to >= view.trace.head.duration_ns;
    const rule = view.trace.head.roles.find(([name]) => name === holder.role)?.[1] ?? "";
    const g = Array.from({ length: grounds.n }, (_, g) => g).find((g) => grounds.addr[g] <= blocks.addr[i] && blocks.addr[i] < grounds.addr[g] + grounds.bytes[g] && grounds.from[g] <= from && grounds.to[g] > from && grounds.kind[g] < 2);
    const steps = view.trace.steps, first = steps.findIndex((it) => it.from <= from && (it.to ?? Infinity) >= from), last = steps.findLastIndex((it) => it.from <= to);
    const lived = `${time(Math.round(to - from))}${first >= 0 && last > first ? `, ${count(last - first)} ${last - first > 1 ? "steps" : "step"}` : ""}`;
    const name = `0x${(BigInt(device.head.base) + BigInt(Math.round(blocks.addr[i]))).toString(16)}`;
    const group = (by: Grouping) => h("button", { type: "button", class: "plain link", title: "Select all of it", onclick: () => view.select({ kind: "group", by, name: holder[by] }) }, shortSite(holder[by]));
    const asked = spare ? `${bytes(size - spare)} requested, ${bytes(size)} allocated` : holder.level === LEVEL.block ? `${bytes(size)}, as requested` : bytes(size);
    return [
      this.facts([
        ["size", asked], ["call site", group("site")], ["role", holder.role === holder.owner ? null : h("span", {}, group("role"), rule ? h("span", { class: "remark" }, rule) : null)], ["owner", group("owner")],
        ["layer", holder.layer === NO_LAYER ? null : group("layer")],
        ["born", `${this.when(from)}, change ${count(device.changes[Math.max(0, device.at(from))])}`],
        ["freed", isKept ? "not before the trace ends" : `${this.when(to)}, change ${count(device.changes[Math.max(0, device.at(to))])}`], ["lived", lived],
        ["stream", device.head.device === HOST ? null : group("stream")], ["pool", holder.pool.startsWith(holder.stream) ? null : group("pool")], ["address", name],
        ["segment", g === undefined ? null : h("button", { type: "button", class: "plain link", title: "Select the segment", onclick: () => view.select({ kind: "segment", from: grounds.from[g], addr: grounds.addr[g] }) }, bytes(grounds.bytes[g]))],
        ["below it", g === undefined ? null : this.neighbour(device, g, i, -1)], ["above it", g === undefined ? null : this.neighbour(device, g, i, 1)],
      ]),
      h("div", { class: "choices" },
        this.act(`Same call site (${this.number((k) => view.trace.holders[blocks.what[k]].site === holder.site)})`, () => view.select({ kind: "group", by: "site", name: holder.site })),
        this.act(`Same size (${this.number((k) => blocks.bytes[k] === size)})`, () => view.select({ kind: "size", bytes: size })),
        first >= 0 ? this.act(`Others of ${steps[first].text}`, () => view.select({ kind: "time", from: steps[first].from, to: steps[first].to ?? view.trace.head.duration_ns, text: steps[first].text })) : "",
        this.act("Zoom to it", () => this.timeline.zoomToSelection(), undefined, "Z"), this.copyButton()),
      this.stack(view.trace.stackOf(holder)),
    ];
  }
  /** A refused request, or an emptying of the cache: what was held then, and the others of its kind. */
  private mark(mark: Mark): HTMLElement[] {
    const { view } = this, device = view.dev!, { list } = view.trace.marks.get(mark.kind)!, at = list.indexOf(mark), state = Math.max(0, device.at(mark.from));
    const go = (to: number) => () => { view.put(device.at(list[to].from)); view.select({ kind: "mark", of: mark.kind, from: list[to].from }); };
    const isEmptied = mark.kind === "cache emptied", lasted = mark.to !== null && mark.to > mark.from ? `, for ${time(mark.to - mark.from)}` : "";
    return [
      this.facts([
        [isEmptied ? "released" : "requested", mark.bytes ? bytes(mark.bytes) : "unknown"], [isEmptied ? "call site" : "", isEmptied ? shortSite(mark.text) : null],
        ["at", this.when(mark.from) + lasted], ["held then", `${bytes(device.total[state])}, of which ${bytes(device.used[state])} in use`], ["number", `${count(at + 1)} of ${count(list.length)}`],
      ]),
      h("div", { class: "choices" }, at > 0 ? this.act("Before", go(at - 1)) : "", at + 1 < list.length ? this.act("Next", go(at + 1), undefined, isEmptied ? "E" : "O") : "", this.act("Zoom to it", () => this.timeline.zoomToSelection(), undefined, "Z"), this.copyButton()),
      this.stack(view.trace.stackOfMark(mark)),
    ];
  }
  private number(is: (block: number) => boolean): string {
    const { blocks } = this.view.dev!.rectangles();
    let n = 0;
    for (let i = 0; i < blocks.n; i++) if (is(i)) n++;
    return count(n);
  }
  /** The next block of a segment below or above one, when that one was born: where it was in the segment. */
  private neighbour(device: Device, ground: number, block: number, side: 1 | -1): HTMLElement | string {
    const { view } = this, { blocks, grounds } = device.rectangles(), at = blocks.from[block];
    let best = -1;
    for (let i = 0; i < blocks.n && blocks.from[i] <= at; i++) {
      if (i === block || blocks.to[i] <= at || blocks.addr[i] < grounds.addr[ground] || blocks.addr[i] >= grounds.addr[ground] + grounds.bytes[ground]) continue;
      const distance = (blocks.addr[i] - blocks.addr[block]) * side;
      if (distance > 0 && (best < 0 || distance < (blocks.addr[best] - blocks.addr[block]) * side)) best = i;
    }
    const edge = side > 0 ? grounds.addr[ground] + grounds.bytes[ground] : grounds.addr[ground], own = side > 0 ? blocks.addr[block] + blocks.bytes[block] : blocks.addr[block];
    const gap = Math.abs((best < 0 ? edge : side > 0 ? blocks.addr[best] : blocks.addr[best] + blocks.bytes[best]) - own), free = gap ? `${bytes(gap)} free, then ` : "";
    if (best < 0) return `${gap ? bytes(gap) + " free, then " : ""}the segment's ${side > 0 ? "end" : "beginning"}`;
    return h("span", {}, free, h("button", { type: "button", class: "plain link", onclick: () => view.select({ kind: "block", from: blocks.from[best], addr: blocks.addr[best] }) }, `${bytes(blocks.bytes[best])}, ${shortSite(view.trace.holders[blocks.what[best]].site)}`));
  }
  private several(picked: Picked): HTMLElement[] {
    const { view } = this, device = view.dev!, { blocks } = device.rectangles(), list = picked.list, at = device.times[view.cursor];
    const now = device.held(view.cursor), n = view.trace.holders.length, ever = new Float64Array(n), here = new Float64Array(n), sizes = new Set<number>();
    let nHere = 0, bytesHere = 0, largest = -1;
    for (const i of list) {
      const size = blocks.bytes[i], holder = blocks.what[i];
      ever[holder] += size;
      sizes.add(size);
      if (largest < 0 || size > blocks.bytes[largest]) largest = i;
      if (blocks.from[i] <= at && blocks.to[i] > at) { nHere++; bytesHere += size; here[holder] += size; }
    }
    const held = picked.isWhole ? picked.bytes : null;
    // Holders that differ by their stream or role alone have one stack.
    const stacks = new Map<number, { lines: string[]; bytes: number; ever: number }>();
    picked.holders.forEach((is, i) => {
      const holder = view.trace.holders[i];
      if (!is || isRest(holder.level)) return;
      const known = stacks.get(holder.stack) ?? { lines: view.trace.stackOf(holder), bytes: 0, ever: 0 };
      stacks.set(holder.stack, { lines: known.lines, bytes: known.bytes + (picked.isWhole ? now.bytes[i] : here[i]), ever: known.ever + ever[i] });
    });
    const order = [...stacks.values()].sort((a, b) => b.bytes - a.bytes || b.ever - a.ever);
    const highest = held ? held.reduce((best, value, state) => (value > held[best] ? state : best), 0) : 0;
    return [
      this.facts([
        ["at the cursor", held ? `${bytes(held[view.cursor])} (${((held[view.cursor] / (device.total[view.cursor] || 1)) * 100).toFixed(1)} % of what was held)` : `${count(nHere)} of these blocks, ${bytes(bytesHere)}`],
        ["highest", held ? h("button", { type: "button", class: "plain link", title: "Move the cursor there", onclick: () => this.timeline.move(highest) }, `${bytes(held[highest])}, ${this.when(device.times[highest])}`) : null],
        ["at the end", held ? bytes(held[device.n - 1]) : null],
        ["blocks", !list.length ? null : `${count(list.length)} in this page${sizes.size === 1 ? `, of ${bytes(blocks.bytes[largest])} each` : sizes.size > 1 ? `, ${count(sizes.size)} sizes up to ${bytes(blocks.bytes[largest])}` : ""}`],
        ["stacks", order.length > 1 ? count(order.length) : null],
      ]),
      h("div", { class: "choices" },
        this.act("Only this", () => { view.isAlone = !view.isAlone; view.changed(); }, view.isAlone, "Draw nothing else over time"),
        this.act("Zoom to it", () => this.timeline.zoomToSelection(), undefined, "Z"),
        largest >= 0 ? this.act("Largest block", () => view.select({ kind: "block", from: blocks.from[largest], addr: blocks.addr[largest] })) : "",
        this.copyButton()),
      ...order.slice(0, MOST_STACKS).map((it, i) => this.stack(it.lines, order.length > 1 ? `${bytes(it.bytes)} at the cursor` : undefined, i < 2)),
      ...(order.length > MOST_STACKS ? [h("p", { class: "note" }, `${count(order.length - MOST_STACKS)} more stacks`)] : []),
    ];
  }
  /** A stack, the innermost line first. */
  private stack(outermost: string[], words?: string, isOpen = true): HTMLElement {
    const { view } = this, lines = [...outermost].reverse();
    const list = h("ol", { class: "stack" }, ...lines.map((line) => h("li", {}, h("button", { type: "button", class: "plain", title: `Select everything below ${line}`, onclick: () => view.select({ kind: "line", text: line }) }, line))));
    return h("details", { open: isOpen }, h("summary", {}, words ? `Stack: ${words}` : `Stack, ${count(lines.length)} ${lines.length === 1 ? "frame" : "frames"}`), list);
  }
  private copyButton(): HTMLElement {
    const button = h("button", { type: "button", title: "C", onclick: () => { copied(this.text()); button.textContent = "Copied"; setTimeout(() => (button.textContent = "Copy"), 1500); } }, "Copy");
    return button;
  }
  /** The selection as text: its figures, then its stacks. */
  text(): string {
    const { picked, marked } = this.view;
    if (!picked && !marked) return "";
    const words = [picked?.title ?? markTitle(marked!)];
    for (const term of this.body.querySelectorAll("dt")) words.push(`${term.textContent}: ${term.nextElementSibling?.textContent ?? ""}`);
    for (const stack of this.body.querySelectorAll("ol.stack")) words.push("", stack.previousElementSibling?.textContent ?? "", ...[...stack.querySelectorAll("li")].map((line) => "  " + line.textContent));
    return words.join("\n") + "\n";
  }
  private get events_(): Events | null {
    const device = this.view.dev;
    return this.isReady && device?.n ? events(device) : null;
  }
  private get at(): number {
    const { view } = this, list = this.events_, device = view.dev;
    if (!list || !device) return -1;
    if (this.current?.device === device && device.at(list.time[this.current.at]) === view.cursor) return this.current.at;
    const { picked } = view, when = view.cursorTime;
    const exact = picked && picked.block >= 0 && device.at(device.rectangles().blocks.from[picked.block]) === view.cursor;
    return exact ? eventAt(list, device.rectangles().blocks.from[picked.block], picked.block) : upTo(list.time, when) - 1;
  }
  /** Goes to an event further on; `isPicked`: and selects what it is of. */
  step(by: number, isPicked: boolean) {
    const { view } = this, list = this.events_, device = view.dev;
    if (!list || !device || !list.n) return;
    const at = Math.min(Math.max(0, this.at + by), list.n - 1);
    this.current = { device, at };
    const state = Math.max(0, device.at(list.time[at]));
    if (isPicked) view.pick = this.pickOf(list, at) ?? view.pick;
    if (isPicked && view.isAlone) view.isAlone = false;
    this.timeline.move(state);
  }
  private pickOf(list: Events, at: number): Pick | null {
    const { blocks, grounds } = this.view.dev!.rectangles(), of = list.of[at];
    switch (list.kind[at]) {
      case EVENT.born: case EVENT.freed: return { kind: "block", from: blocks.from[of], addr: blocks.addr[of] };
      case EVENT.bought: case EVENT.returned: return { kind: "segment", from: grounds.from[of], addr: grounds.addr[of] };
      case EVENT.failed: return { kind: "mark", of: "out of memory", from: list.time[at] };
      default: return null;
    }
  }
  private events() {
    const { view } = this, list = this.events_, device = view.dev;
    if (!list || !device) return this.list.replaceChildren();
    const at = this.at, key = [view.reading, view.picking, at, view.search.text].join();
    if (key === this.listed) return;
    this.listed = key;
    const { blocks, grounds } = device.rectangles(), first = Math.max(0, Math.min(at - (ROWS >> 1), list.n - ROWS)), rows: HTMLElement[] = [], { picked, lit } = view;
    for (let i = first; i < Math.min(first + ROWS, list.n); i++) {
      const of = list.of[i], kind = list.kind[i], isBlock = kind === EVENT.born || kind === EVENT.freed, holder = isBlock ? view.trace.holders[blocks.what[of]] : null;
      const size = isBlock ? blocks.bytes[of] : kind === EVENT.failed ? view.trace.marks.get("out of memory")!.list[of].bytes : grounds.bytes[of];
      const words = isBlock ? shortSite(holder!.site) : kind === EVENT.failed ? "refused" : kind === EVENT.bought ? "segment, from the driver" : "segment, back to the driver";
      const isPicked = kind === EVENT.failed ? view.marked?.kind === "out of memory" && view.marked.from === list.time[i] : picked !== null && (isBlock ? picked.has(of) : picked.ground === of);
      rows.push(h("li", { class: [i === at ? "current" : "", isPicked ? "picked" : "", isBlock && lit?.[blocks.what[of]] ? "lit" : "", kind === EVENT.failed ? "bad" : ""].filter(Boolean).join(" ") || null },
        h("button", { type: "button", class: "plain", "aria-current": i === at ? "true" : null, title: this.when(list.time[i]), onclick: () => { this.current = { device, at: i }; this.step(0, true); } },
          h("span", { class: "amount" }, (kind === EVENT.born || kind === EVENT.bought ? "+" : kind === EVENT.failed ? "\u2715" : "\u2212") + bytes(size)), h("span", { class: "words" }, words))));
    }
    const tiled = device.rectangles().tiles.tiled;
    this.list.replaceChildren(h("h2", {}, "Events ", h("span", { class: "note" }, `${count(at + 1)} of ${count(list.n)}${tiled ? " kept" : ""} (\u2191 \u2193)`)), h("ol", {}, ...rows));
  }
}
