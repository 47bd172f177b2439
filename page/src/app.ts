// The page: the verdict first, then memory over time, then what is asked of it.
import { read, type Data, type Item, type Text } from "./data";
import { Details } from "./details";
import { h, Picture } from "./dom";
import { cell, count } from "./format";
import { Live } from "./live";
import { AddressMap } from "./map";
import { Chapter } from "./model";
import { Ranks } from "./ranks";
import { Owners } from "./owners";
import { search } from "./search";
import { SettingsView } from "./settings";
import { command, Tables } from "./tables";
import { Timeline } from "./timeline";
import { TABS, View, type Tab } from "./view";

const TAB_TITLES: Record<Tab, string> = { live: "What was held", map: "Address map", settings: "Other settings", ranks: "Ranks", tables: "All tables" };
const KEYS: [string, string][] = [["\u2190 \u2192", "cursor to the change before, after (Shift: far); on the flame graph from box to box"], ["P", "cursor to the peak"], ["O S E F", "to the next out-of-memory error, step, emptying of the cache, finding of the job"], ["B", "base for a difference: where the cursor is"], ["+ \u2212 0", "zoom in, out, all"], ["X", "axis: time or changes"], ["1 to 4", "by owner, role, call site, pool"], ["Q W R T Y", "tabs"], ["V", "light up the line that the verdict names"], ["/", "search"], ["D", "dark or light"], ["?", "these keys"], ["mouse", "click: cursor; drag: range; Shift drag: move; Ctrl wheel: zoom; double click: all"]];

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
    const words = line ? h("button", { type: "button", class: "plain", title: "Light this line up in all views (V)", onclick: () => light(line) }, text) : isCommand ? command(text) : text;
    list.append(h("dt", {}, item.label), h("dd", { "data-fact": item.fact, class: isSite ? "site" : null }, words, item.remark ? h("span", { class: "remark" }, item.remark) : null));
  }
  return h("section", { class: "verdict " + told.kind, "data-section": "verdict", "aria-label": "Verdict" }, h("p", { class: "trace" }, report.title), h("h1", {}, told.section.title.replace(/^Verdict: (.)/, (_, first) => first.toUpperCase())), list);
}

/** What is wrong with the job, above what is said of one of its processes: the first finding of `gputrace ranks`, and how sure it is. */
function ofJob(data: Data, toRanks: () => void, light: (line: string) => void): HTMLElement | null {
  const isBad = (item: Item): item is Text => "mood" in item && (item.mood === "bad" || item.mood === "warning");
  const told = data.head.job.find((section) => section.items[0] && isBad(section.items[0]));
  if (!told) return null;
  const [what, sure] = told.items as Text[], line = lineIn(what.text), title = what.text.replace(/^./, (first) => first.toUpperCase());
  const words = line ? h("button", { type: "button", class: "plain", title: "Light this line up in all views", onclick: () => light(line) }, title) : title;
  return h("section", { class: "verdict " + (what.mood === "bad" ? "killed" : ""), "data-section": "job", "aria-label": "Verdict of the job" },
    h("p", { class: "trace" }, `the job of ${count(data.head.chapters.length)} traces`), h("h1", {}, words),
    h("dl", {}, ...(sure?.mood === "note" ? [h("dt", {}, "sure"), h("dd", {}, sure.text)] : []), h("dt", {}, "more"), h("dd", {}, h("button", { type: "button", class: "plain link", onclick: toRanks }, "the ranks side by side, and all findings"))));
}

/** The trace that a page opens with: the first of those whose verdict is worst. */
function worst(chapters: Chapter[]): number {
  const bad = ["out_of_memory", "killed", "grew"], order = (chapter: Chapter) => { const kind = chapter.head.report.verdict?.kind ?? ""; return kind === "nothing_wrong" || !kind ? 0 : bad.includes(kind) ? 2 : 1; };
  return chapters.reduce((best, chapter, i) => (order(chapter) > order(chapters[best]) ? i : best), 0);
}

function start(data: Data, root: HTMLElement) {
  const chapters = data.head.chapters.map((head, i) => new Chapter(head, data, i));
  const view = new View(data, chapters);
  if (chapters.length) view.first = worst(chapters);
  view.restore(location.hash);
  document.title = `gputrace: ${chapters.length > 1 ? chapters.length + " traces" : chapters[0]?.head.report.trace ?? ""}`;
  const timeline = new Timeline(view), tables = new Tables(view);
  const views: Record<Tab, { element: HTMLElement; update(): void }> = { live: new Live(view), map: new AddressMap(view), settings: new SettingsView(view), ranks: new Ranks(view), tables };
  const tabs = TABS.filter((tab) => tab !== "ranks" || chapters.length > 1);
  if (!tabs.includes(view.tab)) view.tab = "live";

  const field = h("input", { type: "search", id: "search", placeholder: "Search everywhere: a regular expression  ( / )", title: "An address such as 0x7f5c40000200 shows its owners, where gputrace serve shows this page", "aria-label": "Search everywhere", "aria-describedby": "found", value: view.search.text, oninput: () => { view.search = search(field.value); view.changed(); } });
  const found = h("span", { id: "found", class: "note", "aria-live": "polite" });
  const pick = h("select", { "aria-label": "Trace and device", onchange: () => { const [trace, device] = pick.value.split(".").map(Number); view.choose(trace, device); view.changed(); } },
    ...chapters.flatMap((chapter, c) => (chapter.devices.length ? chapter.devices : [null]).map((device, d) => {
      const { rank, trace } = chapter.head.report, who = chapters.length > 1 ? (rank === null ? trace : `rank ${rank}`) + ", " : "";
      return h("option", { value: `${c}.${d}` }, who + (device?.head.name ?? "no device"));
    })));
  const toggle = () => { const root = document.documentElement, isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches; root.dataset.theme = isDark ? "light" : "dark"; view.changed(); };
  const help = h("dialog", { "aria-label": "Keys" }, h("h2", {}, "Keys"), h("dl", {}, ...KEYS.flatMap(([key, what]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, what)])), h("form", { method: "dialog" }, h("button", {}, "Close")));
  const axis = h("button", { type: "button", onclick: () => { view.setAxis(view.axis === "time" ? "change" : "time"); view.changed(); } });
  const header = h("header", {}, h("span", { class: "brand" }, "gputrace"), pick, field, found, h("span", { class: "gap" }), axis, h("button", { type: "button", onclick: toggle }, "Dark or light"), h("button", { type: "button", onclick: () => help.showModal() }, "Keys ?"));

  const light = (line: string) => { field.value = line; view.search = search(line); view.by = "site"; view.only = null; view.toLit(); view.changed(); };
  const asked = h("span", { class: "note", "aria-live": "polite" });
  header.insertBefore(asked, axis);
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
  const owners = new Owners(view);
  root.append(header, h("main", {}, owners.element, ofJob(data, () => { choose("ranks"); document.getElementById("tab-ranks")?.scrollIntoView(); }, light), top, h("h2", { class: "quiet" }, "Memory over time"), timeline.element, h("div", { role: "tablist", "aria-label": "Views" }, ...buttons), ...panels), help);

  let shown = -1;
  const update = () => {
    if (shown !== view.chapter) top.replaceChildren(verdict(view.trace, light));
    shown = view.chapter;
    pick.value = `${view.chapter}.${Math.max(0, view.device)}`;
    axis.textContent = view.axis === "time" ? "Axis: time" : "Axis: changes";
    const { lit } = view;
    const { pattern } = view.search, marks = pattern ? [...view.trace.marks.values()].reduce((sum, { list }) => sum + list.filter((mark) => pattern.test(mark.text)).length, 0) : 0;
    found.textContent = view.search.error ? view.search.error : lit ? `${lit.filter(Boolean).length} of ${lit.length} places${marks ? `, ${count(marks)} marks` : ""}` : "";
    timeline.update();
    tabs.forEach((tab, i) => {
      const isChosen = tab === view.tab;
      buttons[i].setAttribute("aria-selected", String(isChosen));
      buttons[i].tabIndex = isChosen ? 0 : -1;
      panels[i].hidden = !isChosen;
      if (isChosen) views[tab].update();
    });
  };
  view.on(update);
  addEventListener("hashchange", () => { view.restore(location.hash); update(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", update);
  // On paper all of it is shown, in dark ink: pictures are drawn before it is printed, not in the next frame.
  let before: string | undefined;
  addEventListener("beforeprint", () => {
    const root = document.documentElement;
    before = root.dataset.theme;
    root.dataset.theme = "light";
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
    const [from, to] = view.window, device = view.dev;
    const at = device?.n ? view.at(view.cursor) : (from + to) / 2;
    const around = at >= from && at <= to ? at : (from + to) / 2;
    const acts: Record<string, () => void> = {
      v: () => top.querySelector<HTMLElement>("dd.site button")?.click(),
      "/": () => field.focus(), "?": () => help.showModal(), d: toggle,
      p: () => device?.n && timeline.move(device.peak), o: () => timeline.next("out of memory"), s: () => timeline.next("step"), e: () => timeline.next("cache emptied"), f: () => timeline.next("finding"),
      b: () => { if (!device?.n) return; view.base = view.cursor; view.moment = "base"; view.changed(); },
      "+": () => timeline.zoomAt(around, 0.6), "=": () => timeline.zoomAt(around, 0.6), "-": () => timeline.zoomAt(around, 1 / 0.6), "0": () => { view.window = view.extent; view.changed(); },
      x: () => { view.setAxis(view.axis === "time" ? "change" : "time"); view.changed(); },
    };
    (["owner", "role", "site", "pool"] as const).forEach((by, i) => (acts[String(i + 1)] = () => { view.by = by; view.only = null; view.changed(); }));
    ["q", "w", "r", "t", "y"].forEach((key, i) => { const tab = TABS[i]; if (tabs.includes(tab)) acts[key] = () => choose(tab); });
    const act = acts[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (act) { event.preventDefault(); act(); }
  });
  update();
  (window as any).gputrace = { view, data };
}

const source = document.getElementById("data")!, text = source.textContent!, root = document.getElementById("app")!;
source.remove();
read(text).then((data) => start(data, root)).catch((error) => root.append(h("p", { class: "bad" }, "This page cannot be read: " + String(error))));
