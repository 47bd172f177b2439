// How fast a page opens and moves, with software rendering: node test/speed.mjs PAGE.html [SHOT.png]
import { existsSync } from "node:fs";
import { chromium } from "playwright-core";

const [file, shot] = process.argv.slice(2);
const executablePath = [process.env.GPUTRACE_BROWSER, "/usr/bin/chromium", "/usr/bin/google-chrome"].find((path) => path && existsSync(path));
const browser = await chromium.launch({ executablePath, args: ["--no-sandbox", "--disable-gpu", "--enable-precise-memory-info"] });
const page = await (await browser.newContext({ offline: true, viewport: { width: 1280, height: 800 } })).newPage();
const begun = Date.now();
await page.goto("file://" + file);
await page.waitForSelector("[data-section=verdict]");
await page.evaluate(() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done))));
console.log(`opened in ${Date.now() - begun} ms; heap ${await page.evaluate(() => Math.round(performance.memory.usedJSHeapSize / 1048576))} MiB`);
for (const tab of ["live", "map"]) {
  await page.click("#tab-" + tab);
  await page.waitForTimeout(500);
  const frames = await page.evaluate(async () => {
    const { view } = window.gputrace, times = [];
    for (let i = 0; i < 40; i++) {
      const [from, to] = view.window, size = to - from, begun = performance.now();
      i % 2 ? view.zoom(from + size * 0.02, to - size * 0.02) : view.zoom(from - size * 0.03, to - size * 0.03);
      view.changed();
      await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
      times.push(performance.now() - begun);
    }
    return times.sort((a, b) => a - b);
  });
  console.log(`${tab}: a frame takes ${frames[20].toFixed(0)} ms, 95 of 100 at most ${frames[37].toFixed(0)} ms`);
}
await page.evaluate(() => { const { view } = window.gputrace; view.restore(""); view.tab = "map"; view.changed(); scrollTo(0, 0); });
await page.waitForTimeout(1500);
if (shot) await page.screenshot({ path: shot, fullPage: true });
await browser.close();
