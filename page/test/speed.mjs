// How fast pages open and move, with software rendering. Several are measured in turns, so that what else the machine does is
// alike for all of them. Of the frames beside their time what the page's main thread computed for each: that is little changed by what
// else runs.
//
//   node test/speed.mjs PAGE.html... [--rounds 8] [--shot FILE.png] [--gl] [--json]
//
// --gl: with WebGL2, which Chromium then computes with SwiftShader. Exits with 77 where there is no browser.
import { existsSync, statSync } from "node:fs";
import { basename, resolve } from "node:path";
import { parseArgs } from "node:util";
import { chromium } from "playwright-core";

const { values: options, positionals: files } = parseArgs({ allowPositionals: true, options: { rounds: { type: "string", default: "8" }, shot: { type: "string" }, gl: { type: "boolean" }, json: { type: "boolean" } } });
const executablePath = [process.env.GPUTRACE_BROWSER, "/usr/bin/chromium", "/usr/bin/google-chrome"].find((path) => path && existsSync(path));
if (!executablePath) {
  console.log("SKIPPED: no browser: install chromium, or name one in GPUTRACE_BROWSER");
  process.exit(77);
}
const gl = options.gl ? ["--use-gl=angle", "--use-angle=swiftshader", "--enable-unsafe-swiftshader", "--ignore-gpu-blocklist"] : ["--disable-gpu"];
const browser = await chromium.launch({ executablePath, args: ["--no-sandbox", "--enable-precise-memory-info", "--js-flags=--expose-gc", ...gl] });
const heapOf = (page) => page.evaluate(() => { gc(); return Math.round(performance.memory.usedJSHeapSize / 1048576); });
const pages = [];
for (const file of files) {
  const context = await browser.newContext({ offline: true, viewport: { width: 1280, height: 800 } }), page = await context.newPage();
  const session = await context.newCDPSession(page);
  await session.send("Performance.enable", { timeDomain: "threadTicks" });
  const begun = Date.now();
  await page.goto("file://" + resolve(file));
  await page.waitForSelector("[data-section=verdict]");
  await page.evaluate(() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done))));
  pages.push({ page, session, name: basename(file), mib: statSync(file).size / 1048576, opened: Date.now() - begun, heap: await heapOf(page), times: {}, thread: {} });
}
/** Milliseconds that the main thread has computed. */
const computed = async (session) => (await session.send("Performance.getMetrics")).metrics.find(({ name }) => name === "TaskDuration").value * 1e3;
for (let round = 0; round < Number(options.rounds); round++) {
  for (const { page, session, times, thread } of pages) {
    await page.bringToFront();
    const tabs = await page.$$eval("[role=tab]", (all) => all.map((it) => it.id.slice(4)));
    for (const tab of ["live", "map", "settings", "ranks"].filter((it) => tabs.includes(it))) {
      await page.click("#tab-" + tab);
      await page.waitForTimeout(300);
      for (const how of ["pan", "zoom"]) {
        const what = `${tab} ${how}`, before = await computed(session), frames = await page.evaluate(moved, how);
        (times[what] ??= []).push(...frames);
        thread[what] = (thread[what] ?? 0) + (await computed(session)) - before;
      }
    }
  }
}
const results = [];
for (const it of pages) {
  const moves = {};
  for (const [what, list] of Object.entries(it.times)) {
    list.sort((a, b) => a - b);
    const at = (share) => Number(list[Math.min(list.length - 1, Math.floor(list.length * share))].toFixed(1));
    moves[what] = { half: at(0.5), most: at(0.95), thread: Number((it.thread[what] / list.length).toFixed(1)), frames: list.length };
  }
  results.push({ page: it.name, mib: it.mib, opened_ms: it.opened, heap_mib: it.heap, heap_end_mib: await heapOf(it.page), moves });
}
if (options.json) console.log(JSON.stringify(results));
else for (const it of results) {
  console.log(`${it.page}: ${it.mib.toFixed(1)} MiB, opened in ${it.opened_ms} ms, ${it.heap_mib} MiB of heap, ${it.heap_end_mib} MiB in the end`);
  for (const [what, row] of Object.entries(it.moves)) console.log(`${it.page}: ${what}: of ${row.frames} frames half take at most ${row.half} ms, 95 of 100 at most ${row.most} ms; the main thread ${row.thread} ms for each`);
}
const [{ page }] = pages;
if (options.shot) {
  await page.evaluate(() => { const { view } = window.gputrace; view.restore(""); view.tab = "map"; view.changed(); scrollTo(0, 0); });
  await page.waitForTimeout(500);
  await page.screenshot({ path: options.shot, fullPage: true });
}
await browser.close();

/** In the page: from each change to when its frame is there. */
async function moved(how) {
  const { view } = window.gputrace, times = [], [first, last] = view.extent;
  view.zoom(first + (last - first) * 0.2, last - (last - first) * 0.2);
  view.changed();
  await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
  for (let i = 0; i < 24; i++) {
    const [from, to] = view.window, size = to - from, begun = performance.now();
    const by = (i % 12 < 6 ? 1 : -1) * size * 0.03;
    if (how === "pan") view.zoom(from + by, to + by); else view.zoom(from + by, to - by);
    view.changed();
    await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
    times.push(performance.now() - begun);
  }
  return times;
}
