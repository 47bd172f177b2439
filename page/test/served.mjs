// `gputrace serve` in a real browser: node test/served.mjs --gputrace PROGRAM TRACE. TRACE must be longer than a page keeps whole. A part with more
// changes than a page has room for is looked at first, where the trace has such a fiftieth: it stays as it was. Then one that there is room for.
import { spawn } from "node:child_process";
import { existsSync, readFileSync } from "node:fs";
import { parseArgs } from "node:util";
import { chromium } from "playwright-core";

const { values: options, positionals: [trace] } = parseArgs({ allowPositionals: true, options: { gputrace: { type: "string" } } });
const executablePath = [process.env.GPUTRACE_BROWSER, "/usr/bin/chromium", "/usr/bin/google-chrome"].find((path) => path && existsSync(path));
/** States that a page has room for, and changes of the part that is looked at: the page asks for twice as much. */
const MOST = 120000, CHANGES = 20000;
const wrong = [], check = (is, words) => { if (!is) wrong.push(words); };
const server = spawn(options.gputrace, ["serve", trace], { stdio: ["ignore", "pipe", "inherit"] });
// Also where the rest of this fails.
process.on("exit", () => server.kill());
const address = await new Promise((done) => server.stdout.once("data", (bytes) => done(String(bytes).trim())));
const browser = await chromium.launch({ executablePath, args: ["--no-sandbox", "--disable-gpu"] });
const page = await (await browser.newContext({ viewport: { width: 1280, height: 800 } })).newPage(), said = [];
page.setDefaultTimeout(1800000);
page.on("console", (message) => said.push(message.text()));
page.on("pageerror", (error) => said.push(String(error)));
page.on("request", (request) => { if (!request.url().startsWith(address)) said.push("asked for " + request.url()); });
await page.goto(address);
await page.waitForSelector("[data-section=verdict]");
const look = (share) => page.evaluate((share) => {
  const { view } = window.gputrace, [from, to] = view.extent, { head, changes } = view.dev, peak = view.dev.total[view.dev.peak];
  view.zoom(from + (to - from) * 0.4, from + (to - from) * (0.4 + share));
  view.changed();
  return { n: head.n_changes, stretch: head.stretch, states: changes.length, peak, change: changes[view.cursor] };
}, share);
const { n, stretch } = await page.evaluate(() => ({ n: window.gputrace.view.dev.head.n_changes, stretch: window.gputrace.view.dev.head.stretch }));
check(stretch > 1, "the trace is so short that the page has all of it");
if (n / 50 > MOST) {
  await page.evaluate(() => { window.first = window.gputrace.view.trace; });
  await look(0.02);
  await page.waitForFunction(() => window.gputrace.view.trace !== window.first);
  check(!(await page.evaluate(() => window.gputrace.view.dev.head.whole)), "a part of more changes than there is room for is said to be whole");
}
const begun = Date.now(), before = await look(Math.min(0.02, CHANGES / n));
await page.waitForFunction(() => window.gputrace.view.dev.head.whole);
const after = await page.evaluate(() => {
  const { view } = window.gputrace, { changes, times, head } = view.dev, [from, to] = head.whole;
  const inside = [...changes].filter((_, i) => times[i] >= from && times[i] <= to);
  return { n: inside.length, span: inside.at(-1) - inside[0] + 1, peak: view.dev.total[view.dev.peak], change: changes[view.cursor], blocks: head.blocks.n_tiled, readout: document.querySelector(".timeline .note").textContent };
});
check(after.n > 1 && after.n === after.span, `of ${after.span} changes of the part ${after.n} are there`);
check(after.peak === before.peak, `the peak is ${after.peak}, and was ${before.peak}`);
check(after.change === before.change, `the cursor was at change ${before.change}, and is at ${after.change}`);
check(/all changes of this part/i.test(after.readout), `the page says: ${after.readout}`);
check(!said.length, `the console has: ${said.slice(0, 3).join(" | ")}`);
const memory = Number(/VmHWM:\s+(\d+)/.exec(readFileSync(`/proc/${server.pid}/status`, "utf8"))[1]);
console.log(`${before.n} changes, ${before.states} of them in the page; a part of it, with its surroundings, has ${after.n}, after ${Date.now() - begun} ms; the server had at most ${Math.round(memory / 1024)} MiB`);
await browser.close();
server.kill();
wrong.forEach((words) => console.log("WRONG: " + words));
console.log(wrong.length ? "FAIL" : "PASS");
process.exitCode = wrong.length ? 1 : 0;
