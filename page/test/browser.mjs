// Opens pages in a real browser without a network, and holds every number in their tables against `gputrace summary --json` and
// `report --json`.
//
//   node test/browser.mjs --gputrace target/debug/gputrace [--shots FOLDER] [--browser /usr/bin/chromium] TRACE...
//
// A trace may be several, joined by commas: the ranks of a job. Exits with 1 where anything is wrong, 77 where there is no browser.
import { execFileSync } from "node:child_process";
import { existsSync, mkdirSync, mkdtempSync, readdirSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { basename, join } from "node:path";
import { parseArgs } from "node:util";
import { chromium } from "playwright-core";

const { values: options, positionals: traces } = parseArgs({ allowPositionals: true, options: { gputrace: { type: "string" }, shots: { type: "string" }, browser: { type: "string" } } });
const browsers = [options.browser, process.env.GPUTRACE_BROWSER, "/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome"];
const executablePath = browsers.find((path) => path && existsSync(path));
if (!executablePath) {
  console.log("SKIPPED: no browser: install chromium, or name one in GPUTRACE_BROWSER");
  process.exit(77);
}
const gputrace = (...args) => execFileSync(options.gputrace, args, { encoding: "utf8", maxBuffer: 1 << 30, stdio: ["ignore", "pipe", "pipe"] });
const axe = readFileSync(new URL("../node_modules/axe-core/axe.min.js", import.meta.url), "utf8");

const examples = new URL("../../examples/", import.meta.url);

const wrong = [];
const check = (is, words) => { if (!is) wrong.push(words); };
const folder = mkdtempSync(join(tmpdir(), "gputrace-page-"));
if (options.shots) mkdirSync(options.shots, { recursive: true });
const browser = await chromium.launch({ executablePath, args: ["--no-sandbox", "--disable-gpu", "--font-render-hinting=none"] });
let n = 0;
const reached = [];

for (const trace of traces) {
  const paths = trace.split(","), name = basename(paths[0]).replace(/\..*/, ""), file = join(folder, name + ".html");
  gputrace("html", "-F", "-o", file, ...paths);
  const summary = JSON.parse(gputrace("summary", "--json", ...paths)), report = JSON.parse(gputrace("report", "--json", ...paths));
  const context = await browser.newContext({ offline: true, viewport: { width: 1280, height: 800 }, colorScheme: "light" });
  const page = await context.newPage(), said = [];
  page.on("console", (message) => said.push(message.text()));
  page.on("pageerror", (error) => said.push(String(error)));
  page.on("request", (request) => { if (!/^(file|data|blob):/.test(request.url())) said.push("asked the network: " + request.url()); });
  const begun = Date.now();
  await page.goto("file://" + file);
  await page.waitForSelector("[data-section=verdict]");
  const opened = Date.now() - begun;

  const before = n;
  for (let chapter = 0; chapter < paths.length; chapter++) {
    await page.evaluate((chapter) => { const { view } = window.gputrace; view.choose(chapter, -1); view.tab = "tables"; view.changed(); }, chapter);
    await page.waitForTimeout(80);
    const shown = await page.evaluate(read);
    const told = report.processes[chapter];
    n += compare(name, shown, told, summary.processes[chapter]);
    n += await states(page, name, summary.processes[chapter]);
  }
  await keys(page, name);
  await search(page, name);
  if (existsSync(new URL(name, examples))) await reach(page, name);
  await page.evaluate(() => { window.gputrace.view.restore(""); window.gputrace.view.by = "site"; window.gputrace.view.changed(); });
  for (const theme of ["light", "dark"]) {
    await page.emulateMedia({ colorScheme: theme });
    for (const tab of await page.$$eval("[role=tab]", (tabs) => tabs.map((tab) => tab.id))) {
      await page.click("#" + tab);
      await page.waitForTimeout(120);
      if (options.shots) {
        await page.evaluate((tab) => (tab === "tab-live" ? scrollTo(0, 0) : document.querySelector("[role=tablist]").scrollIntoView()), tab);
        await page.waitForTimeout(60);
        await page.screenshot({ path: join(options.shots, `${name}-${tab.slice(4)}-${theme}.png`) });
        if (tab === "tab-live") await page.screenshot({ path: join(options.shots, `${name}-full-${theme}.png`), fullPage: true });
      }
      const wide = await page.evaluate(() => document.documentElement.scrollWidth);
      check(wide <= 1280, `${name} ${tab}: ${wide} pixels wide, where 1280 are there`);
      await page.evaluate(axe);
      const found = await page.evaluate(() => axe.run(document, { resultTypes: ["violations"] }));
      for (const it of found.violations) check(false, `${name} ${tab} ${theme}: axe: ${it.id}: ${it.nodes[0].html.slice(0, 160)} ${it.nodes[0].failureSummary.replace(/\s+/g, " ").slice(0, 200)}`);
    }
  }
  await page.emulateMedia({ media: "print" });
  const csp = said.filter((text) => !/axe/.test(text));
  check(!csp.length, `${name}: the console has: ${csp.slice(0, 3).join(" | ")}`);
  console.log(`${name}: opened in ${opened} ms, ${n - before} numbers compared`);
  await context.close();
}
await browser.close();
rmSync(folder, { recursive: true });
if (reached.length) console.log("faulty lines: " + reached.join("; "));
check(n > 0, "no number was compared");
wrong.forEach((words) => console.log("WRONG: " + words));
console.log(wrong.length ? `FAIL: ${wrong.length} things are wrong` : `PASS: ${n} numbers of ${traces.length} pages are those of --json`);
process.exitCode = wrong.length ? 1 : 0;

/** In the page: all facts and tables by section, as their values. */
function read() {
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
function compare(name, shown, told, figures) {
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
      for (const [fact, value] of section.facts) same(fact, value, figures[fact]);
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
async function states(page, name, figures) {
  let n = 0;
  const shown = await page.evaluate(() => window.gputrace.view.trace.devices.map((device) => {
    const owners = {}, held = device.held(device.peak);
    device.chapter.holders.forEach((holder, i) => { const owner = [1, 2].includes(holder.level) ? "PyTorch" : holder.owner.replace(/, in no buffer$/, ""); if (held.bytes[i]) owners[owner] = (owners[owner] ?? 0) + held.bytes[i]; });
    return { device: device.head.device, peak: device.total[device.peak] ?? 0, end: device.total[device.n - 1], owners };
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
  return n;
}

/** The whole way without a mouse; the link shows the same again. */
async function keys(page, name) {
  await page.evaluate(() => { document.activeElement?.blur(); });
  for (const key of ["p", "2", "3", "4", "1", "x", "x", "+", "-", "0", "s", "e", "o", "p", "b", "w", "r", "y", "q"]) await page.keyboard.press(key);
  const state = await page.evaluate(() => { const { view } = window.gputrace; return { by: view.by, tab: view.tab, moment: view.moment, base: view.base !== null || !view.dev?.n }; });
  check(state.by === "owner" && state.tab === "live" && state.base, `${name}: keys: ${JSON.stringify(state)}`);
  // The address follows a moment later.
  await page.waitForTimeout(250);
  const hash = await page.evaluate(() => location.hash);
  await page.evaluate((hash) => { window.gputrace.view.restore(hash); window.gputrace.view.changed(); }, hash);
  await page.waitForTimeout(250);
  check((await page.evaluate(() => location.hash)) === hash, `${name}: the link does not lead to itself: ${hash}`);
  await page.keyboard.press("?");
  check(await page.evaluate(() => document.querySelector("dialog").open), `${name}: ? shows no keys`);
  await page.keyboard.press("Escape");
}

async function search(page, name) {
  await page.fill("#search", "PyTorch|libn?c");
  await page.waitForTimeout(60);
  check(/\d+ of \d+ places/.test(await page.textContent("#found")), `${name}: a search finds nothing`);
  await page.fill("#search", "(");
  check((await page.textContent("#found")).length > 3, `${name}: a wrong expression is not said to be one`);
  await page.fill("#search", "");
}

/** A solved example: the line that its program marks as faulty is in the verdict, and what it held is lit up after a click or two;
 * by keyboard as well. */
async function reach(page, name) {
  const folder = new URL(name + "/", examples), program = readdirSync(folder).find((file) => file.endsWith(".py"));
  const line = readFileSync(new URL(program, folder), "utf8").split("\n").findIndex((it) => it.endsWith("# <- fault")) + 1;
  const place = `${program}:${line})`;
  const start = async () => { await page.evaluate(() => { document.activeElement?.blur(); window.gputrace.view.restore(""); window.gputrace.view.changed(); scrollTo(0, 0); }); await page.waitForTimeout(60); };
  const isLit = (panel) => page.locator(`#panel-${panel} tr.lit, #panel-${panel} .lit, #panel-${panel} [data-table=live] tr, #panel-${panel} [data-table=lines] tr`).filter({ hasText: place, visible: true }).count();
  await start();
  const said = await page.textContent("[data-section=verdict] .site");
  check(said.includes("/" + place), `${name}: the verdict does not name ${place}: ${said}`);
  for (const how of ["clicks", "keys"]) {
    await start();
    let n = 1;
    if (how === "clicks") await page.click("[data-section=verdict] .site button"); else await page.keyboard.press("v");
    await page.waitForTimeout(60);
    const found = await page.textContent("#found");
    check(/[1-9]\d* of|marks/.test(found), `${name}: nothing is lit up by ${place}`);
    if (!(await isLit("live"))) {
      n++;
      if (how === "clicks") await page.click("#tab-tables"); else await page.keyboard.press("y");
      await page.waitForTimeout(60);
      check(await isLit("tables"), `${name}: after ${n} ${how}, ${place} is not shown`);
    }
    reached.push(`${name} ${place} ${n} ${how}`);
  }
  await page.evaluate(() => { window.gputrace.view.restore(""); window.gputrace.view.changed(); });
}
