// Counts the clicks from opening a page to the stack that matters, with a mouse, at 1440 x 900: the eight solved examples of examples/, or
// any traces with their line.
//
//   node test/clicks.mjs --gputrace target/release/gputrace [--memory-viz FOLDER] [--browser /usr/bin/chromium] [TRACE=FILE:LINE...]
//
// The stack counts where its line is in sight, without scrolling. --memory-viz opens the same in PyTorch's memory_viz: FOLDER has its
// MemoryViz.js, what that imports, and node_modules/d3. Its stacks need no click, but the right band: how many bands there are, how many of them
// have the line, and how many are larger than the first of those. Exits with 1 where a page needs more than two clicks, or more than two pages of
// eight need two; 77 where there is no browser.
import { execFileSync } from "node:child_process";
import { existsSync, mkdtempSync, readdirSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { basename, join, resolve } from "node:path";
import { fileURLToPath } from "node:url";
import { parseArgs } from "node:util";
import { chromium } from "playwright-core";

const { values: options, positionals } = parseArgs({ allowPositionals: true, options: { gputrace: { type: "string" }, "memory-viz": { type: "string" }, browser: { type: "string" } } });
const executablePath = [options.browser, process.env.GPUTRACE_BROWSER, "/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome"].find((path) => path && existsSync(path));
if (!executablePath) {
  console.log("SKIPPED: no browser: install chromium, or name one in GPUTRACE_BROWSER");
  process.exit(77);
}
const root = fileURLToPath(new URL("../../", import.meta.url)), folder = mkdtempSync(join(tmpdir(), "gputrace-clicks-"));
const browser = await chromium.launch({ executablePath, args: ["--no-sandbox", "--disable-gpu"] });
const rows = [];
for (const { trace, place } of positionals.length ? positionals.map(named) : examples()) {
  const row = { name: basename(trace).replace(/\..*/, ""), place, ...(await ours(trace, place)) };
  if (options["memory-viz"]) row.theirs = await theirs(trace, place);
  rows.push(row);
}
await browser.close();
rmSync(folder, { recursive: true });
for (const { name, place, clicks, way, theirs } of rows) {
  const bands = theirs && `${theirs.bands} bands, ${theirs.withLine} with the line, ${theirs.withLine ? `${theirs.larger} larger than the first of those` : "none to point at"}`;
  console.log([name.padEnd(28), place.padEnd(30), clicks === null ? "not found" : `${clicks} clicks${way ? ": " + way : ""}`, ...(bands ? ["memory_viz: " + bands] : [])].join("  "));
}
const slow = rows.filter(({ clicks }) => clicks === null || clicks > 2), n = rows.filter(({ clicks }) => clicks === 2).length, good = !slow.length && n * 4 <= rows.length;
console.log(good ? `PASS: at most two clicks in ${rows.length} pages, two in ${n}` : `FAIL: too many clicks: ${slow.map(({ name }) => name).join(", ") || `two in ${n} of ${rows.length}`}`);
process.exitCode = good ? 0 : 1;

/** The line that each example's program marks as faulty. */
function examples() {
  const all = join(root, "examples");
  return readdirSync(all).filter((name) => existsSync(join(root, "tests/golden", name + ".gtr"))).map((name) => {
    const program = readdirSync(join(all, name)).find((file) => file.endsWith(".py"));
    const line = readFileSync(join(all, name, program), "utf8").split("\n").findIndex((it) => it.endsWith("# <- fault")) + 1;
    return { trace: join(root, "tests/golden", name + ".gtr"), place: `${program}:${line}` };
  });
}
function named(words) {
  const at = words.lastIndexOf("=");
  return { trace: words.slice(0, at), place: words.slice(at + 1) };
}

/** The fewest clicks on what anybody would try first: the verdict's line, the first rows of what was held, the tables. */
async function ours(trace, place) {
  const file = join(folder, "page.html"), line = (where) => `${where}:has-text("${place})")`;
  execFileSync(options.gputrace, ["html", "-F", "-o", file, trace], { stdio: "ignore" });
  const page = await (await browser.newContext({ offline: true, viewport: { width: 1440, height: 900 } })).newPage();
  const first = ["[data-section=verdict] .site button", ...[1, 2, 3].map((n) => `[data-table=live] tbody tr:nth-child(${n}) button`)];
  const ways = [[], ...first.map((it) => [it]), ["[data-section=verdict] .site button", "#tab-tables"], ["#tab-tables", line("#panel-tables tr") + " button"], ...first.slice(1).map((it) => ["#tab-live", it])];
  for (const way of ways) {
    await page.goto("about:blank");
    await page.goto("file://" + file);
    await page.waitForSelector("[data-section=verdict]");
    await page.waitForTimeout(150);
    let isThere = true;
    for (const what of way) {
      const target = page.locator(what).first();
      if (!(isThere = (await target.count()) > 0 && (await target.isVisible()))) break;
      await target.click();
      await page.waitForTimeout(100);
    }
    if (!isThere) continue;
    const seen = await page.evaluate((place) => [...document.querySelectorAll(".pane ol.stack li")].some((it) => {
      const { top, bottom } = it.getBoundingClientRect();
      return it.textContent.includes(place + ")") && it.checkVisibility() && top >= 0 && bottom <= innerHeight;
    }), place);
    if (seen) { await page.context().close(); return { clicks: way.length, way: way.join(", then ") }; }
  }
  await page.context().close();
  return { clicks: null, way: "" };
}

/** What memory_viz draws of its blocks over time, by its own code. */
async function theirs(trace, place) {
  const { build } = await import("esbuild"), from = resolve(options["memory-viz"]), pickle = join(folder, "snapshot.pickle");
  const d3 = { name: "d3", setup(it) { it.onResolve({ filter: /^https:/ }, ({ path }) => it.resolve(/npm\/([a-z0-9-]+)@/.exec(path)[1], { resolveDir: from, kind: "import-statement" })); } };
  const { outputFiles: [{ text }] } = await build({ stdin: { contents: 'import * as main from "./MemoryViz.js"; window.main = main;', resolveDir: from }, bundle: true, write: false, plugins: [d3], logLevel: "error" });
  if (/\.gtr$/.test(trace)) execFileSync(options.gputrace, ["export", "-F", "--format", "torch-pickle", "-o", pickle, trace], { stdio: "ignore" });
  const bytes = /\.gtr$/.test(trace) ? readFileSync(pickle) : (await import("node:zlib")).gunzipSync(readFileSync(trace));
  const page = await (await browser.newContext({ offline: true, viewport: { width: 1440, height: 900 } })).newPage();
  await page.addScriptTag({ content: text });
  const found = await page.evaluate(([base64, place]) => {
    window.main.add_local_files([{ name: "snapshot", base64 }], "Active Memory Timeline");
    const pane = () => [...document.querySelectorAll("pre")].map((it) => it.textContent).join("\n");
    // Only the large picture's bands answer to the mouse; the small one is one shape.
    const bands = [...document.querySelectorAll("polygon")].filter((it) => it.__data__?.timesteps).map((it) => {
      it.dispatchEvent(new MouseEvent("mouseover"));
      const { timesteps, size } = it.__data__;
      return { area: size instanceof Array ? 0 : size * (timesteps.at(-1) - timesteps[0]), has: pane().includes("/" + place + ":") || pane().includes(place + ":") };
    }).sort((a, b) => b.area - a.area);
    return { bands: bands.length, withLine: bands.filter(({ has }) => has).length, larger: bands.findIndex(({ has }) => has) };
  }, [bytes.toString("base64"), place]);
  await page.context().close();
  return found;
}
