// The page: the verdict first, then memory over time, then what is asked of it.
import { Busy } from "./busy";
import { read, type Data, type Item, type Text } from "./data";
import { Details } from "./details";
import { copied, h, Picture, prose } from "./dom";
import { cell, count } from "./format";
import { Live } from "./live";
import { AddressMap } from "./map";
import { emptiedAt, evidence, lineOf } from "./evidence";
import { Chapter, GROUPING_TITLES, HOST, type Axis } from "./model";
import { Pane } from "./pane";
import { Ranks } from "./ranks";
import { Owners } from "./owners";
import { search } from "./search";
import { SettingsView } from "./settings";
import { command, Tables } from "./tables";
import { Timeline } from "./timeline";
import { LOW, TABS, TALL, View, type Tab } from "./view";

const TAB_TITLES: Record<Tab, string> = { live: "What was held", map: "Address map", settings: "Other settings", ranks: "Ranks", tables: "All tables" };
const AXIS_TITLES: Record<Axis, string> = { time: "Time", change: "Changes", step: "Steps" };
const KEYS: [string, string][] = [
  ["W S", "zoom in, out (also + and \u2212, or Ctrl and wheel); with Shift the height (also the wheel on the scale)"], ["A D", "move left, right (also Shift and wheel, or Shift and drag)"], ["F", "fit: the verdict's evidence, or where memory changes"], ["0", "show all"], ["Z", "zoom to the range or the selection"],
  ["\u2190 \u2192", "change before, after (Shift: far); on the flame graph box to box"], ["\u2191 \u2193", "event before, after, and select its block"], [", .", "step before, after"], ["P O E N", "peak, next out-of-memory error, next emptying of the cache, next finding of the job"],
  ["Enter", "on the timeline: select the largest block at the cursor"], ["Esc", "clear the selection"], ["C", "copy the selection with its stack"], ["B", "set the base of a difference at the cursor"],
  ["1 to 6", "by owner, role, call site, pool, stream, layer"], ["G", "a band per block, or an area per group"], ["U", "hide what is unused"], ["J K", "twice the height; memory over time stays in sight"], ["L", "lines: context, the driver's figure, the card"], ["X", "axis: time, changes, steps"],
  ["H M I R T", "views: held, map, other settings, ranks, tables"], ["V", "back to the verdict's evidence"], ["/", "search; Enter goes to the next hit"], ["?", "this list"],
  ["mouse", "click: select, and put the cursor; drag: choose a range; double click: fit"],
];

/** What finds a line of the program that a text names, `main (/job/train.py:12)`, wherever it stands. */
function lineIn(text: string): string | null {
  const place = /([^/()]+:\d+)\)/.exec(text);
  return place && place[1].replace(/[.*+?^${}()|[\]\\]/g, "\\$&") + "\\)";
}

function verdict(chapter: Chapter, light: (line: string) => void): HTMLElement {
  const { report } = chapter.head, told = report.verdict;
  if (!told) return h("section", { class: "verdict" }, h("h1", {}, report.title));
  const list = h("dl", {});
  for (const item of told.section.items) {
    if (!("fact" in item)) continue;
    const [text] = cell(item.value), isCommand = typeof item.value === "object" && item.value?.c !== undefined;
    const isSite = item.fact === "call_site", line = isSite ? lineIn(text) : null;
    const words = line ? h("button", { type: "button", class: "plain", title: "Select this line in all views (V)", onclick: () => light(line) }, text) : isCommand ? command(text) : h("span", {}, ...prose(text));
    list.append(h("dt", {}, item.label), h("dd", { "data-fact": item.fact, class: isSite ? "site" : null }, words, item.remark ? h("span", { class: "remark" }, item.remark) : null));
  }
  return h("section", { class: "verdict " + told.kind, "data-section": "verdict", "aria-label": "Verdict" }, h("p", { class: "trace" }, report.title), h("h1", {}, ...prose(told.section.title.replace(/^Verdict: (.)/, (_, first) => first.toUpperCase()))), list);
}

/** What is wrong with the job, above what is said of one of its processes: the first finding of `gputrace ranks`, and how sure it is. */
function ofJob(data: Data, toRanks: () => void, light: (line: string) => void): HTMLElement | null {
  const isBad = (item: Item): item is Text => "mood" in item && (item.mood === "bad" || item.mood === "warning");
  const told = data.head.job.find((section) => section.items[0] && isBad(section.items[0]));
  if (!told) return null;
  const [what, sure] = told.items as Text[], line = lineIn(what.text), title = what.text.replace(/^./, (first) => first.toUpperCase());
  const words = line ? h("button", { type: "button", class: "plain", title: "Select this line in all views", onclick: () => light(line) }, title) : title;
  return h("section", { class: "verdict " + (what.mood === "bad" ? "killed" : ""), "data-section": "job", "aria-label": "Verdict of the job" },
    h("p", { class: "trace" }, `the job of ${count(data.head.chapters.length)} traces`), h("h1", {}, words),
    h("dl", {}, ...(sure?.mood === "note" ? [h("dt", {}, "sure"), h("dd", {}, sure.text)] : []), h("dt", {}, "more"), h("dd", {}, h("button", { type: "button", class: "plain link", onclick: toRanks }, "the ranks side by side, and all findings"))));
}

/** The trace that a page opens with: the first of those whose verdict is worst. */
function worst(chapters: Chapter[]): number {
  const bad = ["out_of_memory", "killed", "grew"], order = (chapter: Chapter) => { const kind = chapter.head.report.verdict?.kind ?? ""; return kind === "nothing_wrong" || !kind ? 0 : bad.includes(kind) ? 2 : 1; };
  return chapters.reduce((best, chapter, i) => (order(chapter) > order(chapters[best]) ? i : best), 0);
}

function start(data: Data, chapters: Chapter[], root: HTMLElement) {
  const view = new View(data, chapters);
  if (chapters.length) view.first = worst(chapters);
  view.evidence = () => { evidence(view); view.captionFor = view.captioned; };
  view.restore(location.hash);
  document.title = `gputrace: ${chapters.length > 1 ? chapters.length + " traces" : chapters[0]?.head.report.trace ?? ""}`;
  const timeline = new Timeline(view), tables = new Tables(view);
  const views: Record<Tab, { element: HTMLElement; update(): void }> = { live: new Live(view), map: new AddressMap(view), settings: new SettingsView(view), ranks: new Ranks(view), tables };
  const tabs = TABS.filter((tab) => tab !== "ranks" || chapters.length > 1 || chapters[0]?.devices.filter((it) => it.head.device !== HOST && it.n).length > 1);
  if (!tabs.includes(view.tab)) view.tab = "live";
  if (chapters.length < 2) TAB_TITLES.ranks = "Devices";

  const field = h("input", { type: "search", id: "search", placeholder: "Search everywhere: a regular expression  ( / )", title: "An address such as 0x7f5c40000200 shows its owners, where gputrace serve shows this page", "aria-label": "Search everywhere", "aria-describedby": "found", value: view.search.text, oninput: () => { view.search = search(field.value); view.changed(); }, onkeydown: (event: KeyboardEvent) => { if (event.key === "Enter") jump(event.shiftKey ? -1 : 1); } });
  /** To the next block that the search lights up, in the order of births; after the last to the first. */
  const jump = (by: 1 | -1) => {
    const { lit, dev } = view;
    if (!lit || !dev?.n) return;
    const { blocks } = dev.rectangles(), hits = Array.from({ length: blocks.n }, (_, i) => i).filter((i) => lit[blocks.what[i]]);
    if (!hits.length) return;
    const current = hits.indexOf(view.picked?.block ?? -1), now = view.cursorTime;
    const next = current >= 0 ? current + by : by > 0 ? hits.findIndex((i) => blocks.from[i] >= now) : hits.findLastIndex((i) => blocks.from[i] <= now);
    const hit = hits[((next < 0 ? (by > 0 ? 0 : hits.length - 1) : next) + hits.length) % hits.length];
    [view.pick, view.isAlone] = [{ kind: "block", from: blocks.from[hit], addr: blocks.addr[hit] }, false];
    timeline.move(Math.max(0, dev.at(blocks.from[hit])));
  };
  const found = h("span", { id: "found", class: "note", "aria-live": "polite" });
  const pick = h("select", { "aria-label": "Trace and device", onchange: () => { const [trace, device] = pick.value.split(".").map(Number); view.open(trace, device); } },
    ...chapters.flatMap((chapter, c) => (chapter.devices.length ? chapter.devices : [null]).map((device, d) => {
      const { rank, trace } = chapter.head.report, who = chapters.length > 1 ? (rank === null ? trace : `rank ${rank}`) + ", " : "";
      return h("option", { value: `${c}.${d}` }, who + (device?.head.name ?? "no device"));
    })));
  const toggle = () => { const root = document.documentElement, isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches; root.dataset.theme = isDark ? "light" : "dark"; view.changed(); };
  const help = h("dialog", { "aria-label": "Keys" }, h("h2", {}, "Keys"), h("dl", {}, ...KEYS.flatMap(([key, what]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, what)])), h("form", { method: "dialog" }, h("button", {}, "Close")));
  const cycle = () => { view.setAxis(view.axes[(view.axes.indexOf(view.axis) + 1) % view.axes.length]); view.changed(); };
  const theme = h("button", { type: "button", onclick: toggle }, "Dark or light");
  const header = h("header", {}, h("span", { class: "brand" }, "gputrace"), pick, field, found, h("span", { class: "gap" }), theme, h("button", { type: "button", onclick: () => help.showModal() }, "Keys ?"));

  /** The verdict's line is selected; a line of another text is searched for. */
  const light = (line: string) => {
    const pick = lineOf(view);
    if (pick && new RegExp(line).test(pick.text)) {
      view.by = "site";
      view.only = null;
      view.pick = pick;
      view.toHighest(view.picked?.bytes ?? null);
      return view.changed();
    }
    const mark = emptiedAt(view);
    if (mark && new RegExp(line).test(mark.text)) {
      view.put(view.dev!.at(mark.from));
      return view.select({ kind: "mark", of: mark.kind, from: mark.from });
    }
    field.value = line;
    view.search = search(line);
    view.by = "site";
    view.only = null;
    view.toHighest(view.litBytes);
    view.changed();
  };
  const asked = h("span", { class: "note", "aria-live": "polite" });
  header.insertBefore(asked, theme);
  new Details(view, (words) => (asked.textContent = words));
  const choose = (tab: Tab) => { view.tab = tab; view.changed(); };
  const buttons = tabs.map((tab) => h("button", {
    type: "button", role: "tab", id: "tab-" + tab, "aria-controls": "panel-" + tab, onclick: () => choose(tab), onkeydown: (event: KeyboardEvent) => {
      const by = event.key === "ArrowRight" ? 1 : event.key === "ArrowLeft" ? -1 : 0;
      if (!by) return;
      const next = tabs[(tabs.indexOf(tab) + by + tabs.length) % tabs.length];
      choose(next);
      document.getElementById("tab-" + next)?.focus();
      event.preventDefault();
    },
  }, TAB_TITLES[tab]));
  const panels = tabs.map((tab) => h("div", { role: "tabpanel", id: "panel-" + tab, "aria-labelledby": "tab-" + tab, tabindex: 0 }, views[tab].element));
  const top = h("div");
  const caption = h("p", { class: "caption" });
  const bar = h("div", { class: "choices bar", role: "group", "aria-label": "How memory over time is drawn" });
  const pressed = (words: string, isPressed: boolean, act: () => void, title?: string) => h("button", { type: "button", "aria-pressed": isPressed, title, onclick: () => { act(); view.changed(); } }, words);
  const taller = () => view.resize(view.height === TALL ? LOW : TALL);
  const fit = () => { view.window = view.fit ?? view.busy; view.rise = [0, 1]; };
  let barFor = "";
  const showBar = () => {
    const key = [view.drawn, view.by, view.axis, view.hidesUnused, view.height === TALL, view.isPinned, view.hasLines, view.isAlone, view.only, view.picking, view.axes.length, view.trace.groupings.length].join();
    if (key === barFor) return;
    barFor = key;
    // What has the focus keeps it.
    const focused = bar.contains(document.activeElement) ? document.activeElement!.textContent : null;
    bar.replaceChildren(
      h("span", { class: "set" }, pressed("Blocks", view.drawn === "blocks", () => (view.drawn = "blocks"), "A band per block (G)"), pressed("Groups", view.drawn === "groups", () => (view.drawn = "groups"), "An area per group (G)")),
      h("span", { class: "set" }, ...view.trace.groupings.map((by, i) => pressed(GROUPING_TITLES[by], view.by === by, () => { view.by = by; view.only = null; }, `Colour and group by ${GROUPING_TITLES[by].toLowerCase()} (${i + 1})`))),
      h("span", { class: "set" }, ...view.axes.map((axis) => pressed(AXIS_TITLES[axis], view.axis === axis, () => view.setAxis(axis), "What the axis counts (X)"))),
      pressed("Hide unused", view.hidesUnused, () => (view.hidesUnused = !view.hidesUnused), "Hide what is reserved and used by nothing (U)"),
      pressed("Taller", view.height === TALL, taller, "Twice the height (J); its lower edge can be dragged"),
      pressed("Pin", view.isPinned, () => (view.isPinned = !view.isPinned), "Memory over time stays in sight while the page is scrolled (K)"),
      pressed("Lines", view.hasLines, () => (view.hasLines = !view.hasLines), "The CUDA context, the driver's figure, the card (L)"),
      h("button", { type: "button", title: "Show the verdict's evidence, or where memory changes (F)", onclick: () => { fit(); view.changed(); } }, "Fit"),
      ...(view.isAlone || view.only !== null ? [h("button", { type: "button", class: "primary", onclick: () => { view.isAlone = false; view.only = null; view.changed(); } }, "Show everything")] : []));
    if (focused) [...bar.querySelectorAll("button")].find((it) => it.textContent === focused)?.focus();
  };
  const owners = new Owners(view);
  const pane = new Pane(view, timeline);
  root.append(header, h("div", { class: "frame" }, h("main", {}, owners.element, ofJob(data, () => { choose("ranks"); document.getElementById("tab-ranks")?.scrollIntoView(); }, light), top, h("h2", { class: "quiet" }, "Memory over time"), caption, bar, timeline.element, h("div", { role: "tablist", "aria-label": "Views" }, ...buttons), ...panels), pane.element), help);

  let shown = -1;
  const update = () => {
    if (shown !== view.chapter) top.replaceChildren(verdict(view.trace, light));
    shown = view.chapter;
    pick.value = `${view.chapter}.${Math.max(0, view.device)}`;
    if (document.activeElement !== field) field.value = view.search.text;
    caption.textContent = view.caption;
    caption.hidden = !view.caption || view.captionFor !== view.captioned;
    showBar();
    const { lit } = view;
    const { pattern } = view.search, marks = pattern ? [...view.trace.marks.values()].reduce((sum, { list }) => sum + list.filter((mark) => pattern.test(mark.text)).length, 0) : 0;
    found.textContent = view.search.error ? view.search.error : lit ? `${lit.filter(Boolean).length} of ${lit.length} places${marks ? `, ${count(marks)} marks` : ""}` : "";
    timeline.update();
    pane.update();
    tabs.forEach((tab, i) => {
      const isChosen = tab === view.tab;
      buttons[i].setAttribute("aria-selected", String(isChosen));
      buttons[i].tabIndex = isChosen ? 0 : -1;
      panels[i].hidden = !isChosen;
      if (isChosen) views[tab].update();
    });
  };
  view.on(update);
  for (const event of ["hashchange", "popstate"]) addEventListener(event, () => {
    if (location.hash === view.fragment()) return;
    view.restore(location.hash);
    if (!tabs.includes(view.tab)) view.tab = "live";
    field.value = view.search.text;
    update();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", update);
  // On paper all of it is shown, in dark ink: pictures are drawn before it is printed, not in the next frame.
  let before: string | undefined;
  addEventListener("beforeprint", () => {
    const root = document.documentElement;
    before = root.dataset.theme;
    root.dataset.theme = "light";
    if (view.dev?.n) for (const _ of view.dev.rectangles().layOut(view.axis));
    update();
    panels.forEach((panel, i) => { panel.hidden = false; views[tabs[i]].update(); });
    Picture.drawAll();
  });
  addEventListener("afterprint", () => {
    if (before) document.documentElement.dataset.theme = before; else delete document.documentElement.dataset.theme;
    update();
  });
  addEventListener("keydown", (event) => {
    const isTyping = event.target instanceof HTMLInputElement || event.target instanceof HTMLSelectElement;
    if (isTyping && event.key === "Escape") (event.target as HTMLElement).blur();
    if (isTyping || event.ctrlKey || event.metaKey || event.altKey || help.open) return;
    const device = view.dev, wide = view.window[1] - view.window[0];
    const onButton = event.target instanceof HTMLButtonElement || (event.target as HTMLElement).tagName === "SUMMARY", isList = (event.target as HTMLElement).matches?.(".scroll, .scroll *, [role=tab], .pane");
    const has = (act: () => void) => () => { if (device?.n) act(); }, far = Math.max(1, Math.round((device?.n ?? 1) / 50));
    const acts: Record<string, () => void> = {
      v: () => { view.evidence(); view.changed(); }, "/": () => { field.focus(); field.select(); }, "?": () => help.showModal(), c: () => copied(pane.text()), g: () => { view.drawn = view.drawn === "blocks" ? "groups" : "blocks"; view.changed(); },
      u: () => { view.hidesUnused = !view.hidesUnused; view.changed(); }, j: () => { taller(); view.changed(); }, k: () => { view.isPinned = !view.isPinned; view.changed(); }, l: () => { view.hasLines = !view.hasLines; view.changed(); }, x: cycle, f: () => { fit(); view.changed(); }, z: () => timeline.zoomToSelection(),
      p: has(() => timeline.move(device!.peak)), o: () => timeline.next("out of memory"), e: () => timeline.next("cache emptied"), n: () => timeline.next("finding"), ".": () => timeline.next("step"), ",": () => timeline.next("step", -1),
      b: has(() => { view.base = view.cursor; view.moment = "base"; view.changed(); }),
      w: () => (event.shiftKey ? timeline.raise(0.7) : timeline.zoom(0.7)), s: () => (event.shiftKey ? timeline.raise(1 / 0.7) : timeline.zoom(1 / 0.7)), "+": () => timeline.zoom(0.7), "=": () => timeline.zoom(0.7), "-": () => timeline.zoom(1 / 0.7), a: () => timeline.pan(-wide / 6), d: () => timeline.pan(wide / 6), "0": () => { view.window = view.extent; view.rise = [0, 1]; view.changed(); },
      Escape: () => { view.span = null; view.only = null; view.select(null); },
    };
    if (!isList || event.target === pane.element) {
      acts.ArrowUp = has(() => pane.step(-1, true));
      acts.ArrowDown = has(() => pane.step(1, true));
      acts.ArrowLeft = has(() => timeline.move(view.cursor - (event.shiftKey ? far : 1)));
      acts.ArrowRight = has(() => timeline.move(view.cursor + (event.shiftKey ? far : 1)));
    }
    view.trace.groupings.forEach((by, i) => (acts[String(i + 1)] = () => { view.by = by; view.only = null; view.changed(); }));
    ["h", "m", "i", "r", "t"].forEach((key, i) => { const tab = TABS[i]; if (tabs.includes(tab)) acts[key] = () => choose(tab); });
    const act = acts[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (act && !(onButton && (event.key === "Enter" || event.key === " ")) && !event.defaultPrevented) { event.preventDefault(); act(); }
  });
  update();
  (window as any).gputrace = { view, data, timeline };
}

const source = document.getElementById("data")!, text = source.textContent!, root = document.getElementById("app")!;
source.remove();
async function open() {
  const busy = new Busy(root), chapters: Chapter[] = [];
  try {
    const data = await read(text, (share) => busy.say("Unpacking the trace", share));
    for (const head of data.head.chapters) {
      await busy.say("Adding up its states", chapters.length / data.head.chapters.length);
      chapters.push(new Chapter(head, data, chapters.length));
    }
    busy.done();
    start(data, chapters, root);
  } catch (error) {
    busy.done();
    root.append(h("p", { class: "bad" }, "This page cannot be read: " + String(error)));
  }
}
void open();
