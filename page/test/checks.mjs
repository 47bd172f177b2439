// What is held against `gputrace summary --json` and `report --json` in every browser, and the ways through a page. A page is what
// playwright's are: `evaluate`, `keyboard`, and so on.
import { existsSync, readdirSync, readFileSync } from "node:fs";

const examples = new URL("../../examples/", import.meta.url);
/** What was found wrong, in words. */
export const wrong = [];
export const check = (is, words) => { if (!is) wrong.push(words); };
/** How faulty lines were reached. */
export const reached = [];
/** Whether a trace is one of the solved examples'. */
export const isExample = (name) => existsSync(new URL(name, examples));

/** So many milliseconds by the page's own timers: what it had put off for less is done then, however busy the machine is. */
export const rest = (page, time) => page.evaluate((time) => new Promise((done) => setTimeout(done, time)), time);

/** In the page: all facts and tables by section, as their values. */
export function read() {
  const value = (element) => (element.hasAttribute("data-value") ? element.getAttribute("data-value") : null);
  return [...document.querySelectorAll("#panel-tables [data-section]")].map((section) => ({
    name: section.dataset.section,
    facts: [...section.querySelectorAll("[data-fact]")].map((it) => [it.dataset.fact, value(it)]),
    tables: [...section.querySelectorAll("table")].map((table) => ({
      name: table.dataset.table,
      columns: [...table.querySelectorAll("thead th")].map((it) => it.dataset.column),
      rows: [...table.querySelectorAll("tbody tr")].map((row) => [...row.children].map(value)),
    })),
  }));
}

/** Everything that the page shows of a process, held against what programs get. Says how many values were compared. */
export function compare(name, shown, told, figures) {
  let n = 0;
  const same = (where, is, wanted) => {
    n++;
    check(String(is ?? "") === String(wanted ?? ""), `${name}: ${where} is ${is}, in --json ${wanted}`);
  };
  // A section of each device has the same name.
  const left = [...told.sections];
  for (const section of shown) {
    if (/^marks_/.test(section.name)) continue;
    if (section.name === "summary") {
      for (const [fact, value] of section.facts) same(fact, value, fact.split(".").reduce((it, key) => it?.[key], figures));
      if (figures.host.peak_bytes) same("facts of the host", section.facts.filter(([fact]) => fact.startsWith("host.")).length, Object.keys(figures.host).length);
      figures.devices.forEach((device, row) => section.tables[0].columns.forEach((column, at) => {
        if (at > 1) same(`${column} of device ${row}`, section.tables[0].rows[row][at], column.split(".").reduce((it, key) => it?.[key], device));
      }));
      continue;
    }
    if (section.name === "summary_owners") {
      const owners = figures.devices.flatMap((device) => device.owners);
      same("owners", section.tables[0]?.rows.length ?? 0, owners.length);
      owners.forEach((owner, row) => section.tables[0].columns.forEach((column, at) => { if (at) same(`${column} of ${owner.owner}`, section.tables[0].rows[row][at], owner[column]); }));
      continue;
    }
    const [wanted] = left.splice(Math.max(0, left.findIndex((it) => it.name === section.name)), 1);
    if (wanted?.name !== section.name) { check(false, `${name}: section ${section.name} is not in report --json`); continue; }
    for (const [fact, value] of section.facts) same(`${section.name}.${fact}`, value, wanted[fact]);
    // Tables of one name, one for each device, are one list for programs.
    const lists = {};
    for (const table of section.tables) (lists[table.name] ??= { ...table, rows: [] }).rows.push(...table.rows);
    for (const table of Object.values(lists)) {
      const rows = wanted[table.name] ?? [];
      same(`rows of ${section.name}.${table.name}`, table.rows.length, rows.length);
      table.rows.forEach((row, at) => row.forEach((value, column) => same(`${section.name}.${table.name}[${at}].${table.columns[column]}`, value, rows[at]?.[table.columns[column]])));
    }
  }
  check(!left.length, `${name}: the page lacks ${left.map((it) => it.name)}`);
  return n;
}

/** The pictures' own numbers: the highest state and its owners are those of the summary. */
export async function states(page, name, figures) {
  let n = 0;
  const shown = await page.evaluate(() => window.gputrace.view.trace.devices.map((device) => {
    const owners = {}, held = device.held(device.peak);
    device.chapter.holders.forEach((holder, i) => { const owner = [1, 2].includes(holder.level) ? "PyTorch" : holder.owner.replace(/, in no buffer$/, ""); if (held.bytes[i]) owners[owner] = (owners[owner] ?? 0) + held.bytes[i]; });
    return { device: device.head.device, peak: device.total[device.peak] ?? 0, end: device.total[device.n - 1], used: device.used[device.n - 1], owners };
  }));
  for (const device of figures.devices) {
    const found = shown.find((it) => it.device === device.device);
    n++;
    check((found?.peak ?? 0) === device.driver.peak_bytes, `${name}: the highest state of cuda:${device.device} has ${found?.peak}, the summary ${device.driver.peak_bytes}`);
    for (const owner of device.owners) {
      n++;
      check((found?.owners[owner.owner] ?? 0) === owner.bytes_at_peak, `${name}: ${owner.owner} has ${found?.owners[owner.owner]} in the highest state, ${owner.bytes_at_peak} in the summary`);
    }
  }
  // Pinned memory of the host is the last of the devices.
  const host = shown.find((it) => it.device === -2), { peak_bytes, blocks_live_bytes } = figures.host;
  n++;
  check((host?.peak ?? 0) === peak_bytes, `${name}: the highest state of the host has ${host?.peak}, the summary ${peak_bytes}`);
  if (blocks_live_bytes !== undefined) check(host?.used === blocks_live_bytes, `${name}: at the end ${host?.used} of the host are in blocks, in the summary ${blocks_live_bytes}`);
  return n;
}

/** The whole way without a mouse; the link shows the same again. */
export async function keys(page, name) {
  await page.evaluate(() => { document.activeElement?.blur(); });
  for (const key of ["p", "2", "3", "4", "5", "6", "1", "g", "g", "u", "u", "j", "j", "k", "k", "l", "l", "x", "x", "x", "w", "d", "a", "s", "+", "-", "0", ".", ",", "e", "o", "p", "ArrowDown", "ArrowUp", "z", "f", "Escape", "b", "m", "i", "t", "h"]) await page.keyboard.press(key);
  const state = await page.evaluate(() => { const { view } = window.gputrace; return { by: view.by, tab: view.tab, moment: view.moment, base: view.base !== null || !view.dev?.n }; });
  check(state.by === "owner" && state.tab === "live" && state.base, `${name}: keys: ${JSON.stringify(state)}`);
  // The address follows a moment later.
  await rest(page, 250);
  const hash = await page.evaluate(() => location.hash);
  await page.evaluate((hash) => { window.gputrace.view.restore(hash); window.gputrace.view.changed(); }, hash);
  await rest(page, 250);
  check((await page.evaluate(() => location.hash)) === hash, `${name}: the link does not lead to itself: ${hash}`);
  // What a link says wrongly is as at the beginning.
  const [plain, odd] = await page.evaluate(() => ["", "#trace=99&device=99&by=x&tab=x&moment=x&axis=x&window=9-1&range=5-1"].map((link) => { window.gputrace.view.restore(link); return window.gputrace.view.fragment(); }));
  check(plain === odd, `${name}: a wrong link leads to ${odd}, and not to ${plain}`);
  await page.evaluate((hash) => { window.gputrace.view.restore(hash); window.gputrace.view.changed(); }, hash);
  const height = () => page.evaluate(() => window.gputrace.view.height), before = await height();
  await page.evaluate(() => document.querySelector(".grip").focus());
  await page.keyboard.press("ArrowDown");
  check((await height()) > before, `${name}: the picture's height stays ${before}`);
  await page.keyboard.press("ArrowUp");
  check((await height()) === before, `${name}: the picture's height is not ${before} again`);
  await page.evaluate(() => document.activeElement.blur());
  await page.keyboard.press("?");
  check(await page.evaluate(() => document.querySelector("dialog").open), `${name}: ? shows no keys`);
  await page.keyboard.press("Escape");
}

/** In the page, before its own code: remembers what answers to a click. */
export function rememberClicks() {
  const add = EventTarget.prototype.addEventListener;
  window.clickable = new Set();
  EventTarget.prototype.addEventListener = function (type, ...rest) {
    if (type === "click" && this instanceof Element) window.clickable.add(this);
    return add.call(this, type, ...rest);
  };
}

/** In one view: whatever can be clicked is reached by Tab, and its focus is seen. Of very many rows the first are tried. */
export async function tabs(page, name, view) {
  const n = await page.evaluate(() => {
    const all = [...document.querySelectorAll("button, select, input, summary, a[href], [tabindex]")].filter((it) => it.tabIndex >= 0 && !it.disabled && it.checkVisibility({ visibilityProperty: true }));
    Object.assign(window, { expected: all.slice(0, 120), focused: new Set(), unseen: [] });
    // Not `focusin`: Firefox has none in a window that is not in front, and shows no focus there.
    document.addEventListener("keyup", () => {
      const target = document.activeElement;
      if (!target || target === document.body) return;
      window.focused.add(target);
      const style = getComputedStyle(target);
      if (document.hasFocus() && (style.outlineStyle === "none" || parseFloat(style.outlineWidth) < 1)) window.unseen.push(target.outerHTML.slice(0, 80));
    });
    // Without a focus, a browser goes on where the last one was.
    const top = document.createElement("span");
    top.tabIndex = -1;
    document.body.prepend(top);
    top.focus();
    window.focused.clear();
    window.unseen.length = 0;
    scrollTo(0, 0);
    return window.expected.length;
  });
  for (let i = 0; i <= n; i++) await page.keyboard.press("Tab");
  const [missed, unseen] = await page.evaluate(() => [window.expected.filter((it) => !window.focused.has(it)).map((it) => it.outerHTML.slice(0, 80)), window.unseen]);
  check(!missed.length, `${name} ${view}: Tab does not reach ${missed.length} of ${n}: ${missed[0]}`);
  check(!unseen.length, `${name} ${view}: it cannot be seen that ${unseen[0]} has the focus`);
  const clicked = await page.evaluate(() => [...window.clickable].filter((it) => it.isConnected && it.checkVisibility() && it.tabIndex < 0 && it.role !== "tab" && !it.querySelector("button, [tabindex]")).map((it) => it.outerHTML.slice(0, 80)));
  check(!clicked.length, `${name} ${view}: can only be clicked: ${clicked[0]}`);
  return n;
}

/** On a phone no view is wider than the screen, and no row of a table higher than nine lines. */
export async function narrow(page, name) {
  await page.setViewportSize({ width: 390, height: 844 });
  for (const tab of await page.$$eval("[role=tab]", (tabs) => tabs.map((tab) => tab.id.slice(4)))) {
    await page.evaluate((tab) => { const { view } = window.gputrace; view.tab = tab; view.changed(); }, tab);
    await rest(page, 120);
    const [wide, [tall, row]] = await page.evaluate(() => [document.documentElement.scrollWidth, [...document.querySelectorAll("tbody tr")].map((row) => [row.checkVisibility() ? row.getBoundingClientRect().height : 0, row.innerText]).reduce((most, row) => (row[0] > most[0] ? row : most), [0, ""])]);
    check(wide <= 390, `${name} ${tab}: ${wide} pixels wide, where 390 are there`);
    check(tall <= 180, `${name} ${tab}: on a phone a row is ${tall} pixels high: ${row.replace(/\s+/g, " ").slice(0, 80)}`);
  }
  await page.setViewportSize({ width: 1280, height: 800 });
}

export async function search(page, name) {
  await page.fill("#search", "PyTorch|libn?c");
  await rest(page, 60);
  check(/\d+ of \d+ places/.test(await page.textContent("#found")), `${name}: a search finds nothing`);
  await page.fill("#search", "(");
  check((await page.textContent("#found")).length > 3, `${name}: a wrong expression is not said to be one`);
  await page.fill("#search", "");
}

/** A solved example: the line that its program marks as faulty is in the verdict, and what it held is lit up after a click or two;
 * by keyboard as well. */
export async function reach(page, name) {
  const folder = new URL(name + "/", examples), program = readdirSync(folder).find((file) => file.endsWith(".py"));
  const line = readFileSync(new URL(program, folder), "utf8").split("\n").findIndex((it) => it.endsWith("# <- fault")) + 1;
  const place = `${program}:${line})`;
  const start = async () => { await page.evaluate(() => { document.activeElement?.blur(); window.gputrace.view.restore(""); window.gputrace.view.changed(); scrollTo(0, 0); }); await rest(page, 60); };
  const isLit = (panel) => page.locator(`#panel-${panel} tr.picked, #panel-${panel} tr.lit, #panel-${panel} .lit, #panel-${panel} [data-table=live] tr, #panel-${panel} [data-table=lines] tr`).filter({ hasText: place, visible: true }).count();
  await start();
  const said = await page.textContent("[data-section=verdict] .site");
  check(said.includes("/" + place), `${name}: the verdict does not name ${place}: ${said}`);
  // Where the line holds memory, its stack is there without a click.
  const stack = (await page.$$eval(".pane ol.stack li", (lines) => lines.map((line) => line.textContent))).filter((line) => line.includes(place));
  if (stack.length) reached.push(`${name} ${place} in the pane at once`);
  check(stack.length || !(await page.evaluate((place) => { const { view } = window.gputrace; return view.trace.holders.some((holder, i) => view.dev.total[view.cursor] && view.dev.held(view.cursor).bytes[i] > 0 && view.trace.stackOf(holder).some((line) => line.includes(place))); }, place)), `${name}: the page does not open on the stack of ${place}`);
  for (const how of ["clicks", "keys"]) {
    await start();
    let n = 1;
    if (how === "clicks") await page.click("[data-section=verdict] .site button"); else await page.keyboard.press("v");
    await rest(page, 60);
    const found = await page.textContent("#found"), picked = await page.textContent(".pane h2");
    check(picked.includes(place) || /[1-9]\d* of|marks/.test(found), `${name}: nothing is selected or lit up by ${place}`);
    if (!(await isLit("live"))) {
      n++;
      if (how === "clicks") await page.click("#tab-tables"); else await page.keyboard.press("t");
      await rest(page, 60);
      check(await isLit("tables"), `${name}: after ${n} ${how}, ${place} is not shown`);
    }
    reached.push(`${name} ${place} ${n} ${how}`);
  }
  await page.evaluate(() => { window.gputrace.view.restore(""); window.gputrace.view.changed(); });
}

/** One block is selected: every view shows it, its stack is whole, and "back" goes back. The bands of each column add up to what was
 * held. Says how many values were compared. */
export async function selection(page, name) {
  let n = 0;
  const same = (what, is, wanted) => { n++; check(String(is) === String(wanted), `${name}: ${what} is ${is}, and not ${wanted}`); };
  await page.evaluate(() => { document.activeElement?.blur(); const { view } = window.gputrace; view.restore("#trace=0&by=site&tab=live"); view.changed(); });
  // The address of this is behind us.
  await rest(page, 250);
  const has = await page.evaluate(() => { const { view } = window.gputrace, { blocks } = view.dev?.n ? view.dev.rectangles() : { blocks: { n: 0 } }, at = view.dev?.times[view.cursor]; return Array.from({ length: blocks.n }, (_, i) => i).some((i) => blocks.from[i] <= at && blocks.to[i] > at); });
  if (!has) return n;
  await page.focus(".timeline canvas");
  await page.keyboard.press("Enter");
  await rest(page, 250);
  const told = await page.evaluate(() => {
    const { view } = window.gputrace, { picked, dev } = view, { blocks } = dev.rectangles(), i = picked?.block ?? -1;
    if (i < 0) return null;
    const holder = view.trace.holders[blocks.what[i]], there = Array.from({ length: blocks.n }, (_, i) => i).filter((i) => blocks.from[i] <= dev.times[view.cursor] && blocks.to[i] > dev.times[view.cursor]);
    return { site: holder.site, frames: view.trace.stackOf(holder).reverse(), bytes: blocks.bytes[i], most: Math.max(...there.map((i) => blocks.bytes[i])), hash: location.hash };
  });
  if (!told) { check(false, `${name}: Enter selects no block`); return n; }
  same("the block that Enter selects", told.bytes, told.most);
  check(told.hash.includes("pick="), `${name}: the link does not have the selection: ${told.hash}`);
  same("the stack of the selection", JSON.stringify(await page.$$eval(".pane ol.stack li", (lines) => lines.map((line) => line.textContent))), JSON.stringify(told.frames));
  const picked = await page.$$eval("[data-table=live] tr.picked td:first-child", (cells) => cells.map((cell) => cell.dataset.value));
  same("the row of the selection", JSON.stringify(picked), JSON.stringify([told.site]));
  // No group has more in its bands than it held. Of states at one time the last is what was there then.
  const over = await page.evaluate(() => {
    const { view, timeline } = window.gputrace, { dev } = view, { blocks } = dev.rectangles(), series = dev.series(view.by), { columns, times, ids } = timeline.shown;
    let most = 0, n = 0;
    columns.forEach(([state], x) => {
      if (Number.isNaN(times[x]) || x % 8 || dev.times[state + 1] === dev.times[state]) return;
      const drawn = series.groups.map(() => 0);
      for (const id of ids) if (blocks.from[id] <= times[x] && blocks.to[id] > times[x]) drawn[series.groupOf[blocks.what[id]]] += blocks.bytes[id];
      drawn.forEach((bytes, group) => { most = Math.max(most, bytes - series.bytes[group][state]); n++; });
    });
    return { most, n };
  });
  check(over.n > 0 && over.most <= 0, `${name}: bands have ${over.most} bytes more than was held (${over.n} compared)`);
  // Another block, and back.
  await page.keyboard.press("Enter");
  await rest(page, 250);
  if ((await page.evaluate(() => location.hash)) !== told.hash) {
    await page.goBack();
    await rest(page, 250);
    same("the address after going back", await page.evaluate(() => location.hash), told.hash);
  }
  // The arrows go from event to event.
  await page.keyboard.press("ArrowDown");
  same("the row of the next event", await page.$$eval(".events li.current", (rows) => rows.length), 1);
  await page.keyboard.press("Escape");
  same("the selection after Escape", await page.evaluate(() => window.gputrace.view.pick), null);
  await rest(page, 150);
  return n;
}
