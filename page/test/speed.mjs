// How fast pages open and move, with software rendering. Several are measured in turns, so that what else the machine does is
// alike for all of them.
//
//   node test/speed.mjs PAGE.html... [--rounds 8] [--shot FILE.png] [--gl]
//
// --gl: with WebGL2, which Chromium then computes with SwiftShader.
import { existsSync, statSync } from "node:fs";
import { basename, resolve } from "node:path";
import { parseArgs } from "node:util";
import { chromium } from "playwright-core";

const { values: options, positionals: files } = parseArgs({ allowPositionals: true, options: { rounds: { type: "string", default: "8" }, shot: { type: "string" }, gl: { type: "boolean" } } });
const executablePath = [process.env.GPUTRACE_BROWSER, "/usr/bin/chromium", "/usr/bin/google-chrome"].find((path) => path && existsSync(path));
const gl = options.gl ? ["--use-gl=angle", "--use-angle=swiftshader", "--enable-unsafe-swiftshader", "--ignore-gpu-blocklist"] : ["--disable-gpu"];
const browser = await chromium.launch({ executablePath, args: ["--no-sandbox", "--enable-precise-memory-info", "--js-flags=--expose-gc", ...gl] });
const pages = [];
for (const file of files) {
  const page = await (await browser.newContext({ offline: true, viewport: { width: 1280, height: 800 } })).newPage();
  const begun = Date.now();
  await page.goto("file://" + resolve(file));
  await page.waitForSelector("[data-section=verdict]");
  await page.evaluate(() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done))));
  const opened = Date.now() - begun, heap = await page.evaluate(() => { gc(); return Math.round(performance.memory.usedJSHeapSize / 1048576); });
  console.log(`${basename(file)}: ${(statSync(file).size / 1048576).toFixed(1)} MiB, opened in ${opened} ms, ${heap} MiB of heap`);
  pages.push({ page, name: basename(file), times: {} });
}
for (let round = 0; round < Number(options.rounds); round++) {
  for (const { page, times } of pages) {
    await page.bringToFront();
    for (const tab of ["live", "map"]) {
      await page.click("#tab-" + tab);
      await page.waitForTimeout(300);
      for (const how of ["pan", "zoom"]) (times[`${tab} ${how}`] ??= []).push(...await page.evaluate(moved, how));
    }
  }
}
for (const { name, times } of pages) {
  for (const [what, list] of Object.entries(times)) {
    list.sort((a, b) => a - b);
    const at = (share) => list[Math.min(list.length - 1, Math.floor(list.length * share))].toFixed(1);
    console.log(`${name}: ${what}: of ${list.length} frames half take at most ${at(0.5)} ms, 95 of 100 at most ${at(0.95)} ms`);
  }
}
const [{ page }] = pages;
await page.evaluate(() => { const { view } = window.gputrace; view.restore(""); view.tab = "map"; view.changed(); scrollTo(0, 0); });
await page.waitForTimeout(500);
console.log(`${pages[0].name}: ${await page.evaluate(() => { gc(); return Math.round(performance.memory.usedJSHeapSize / 1048576); })} MiB of heap in the end`);
if (options.shot) await page.screenshot({ path: options.shot, fullPage: true });
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
