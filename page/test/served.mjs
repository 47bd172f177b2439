// `gputrace serve` in a real browser: node test/served.mjs --gputrace PROGRAM TRACE. TRACE must be longer than a page keeps whole.
import { spawn } from "node:child_process";
import { existsSync, readFileSync } from "node:fs";
import { parseArgs } from "node:util";
import { chromium } from "playwright-core";

const { values: options, positionals: [trace] } = parseArgs({ allowPositionals: true, options: { gputrace: { type: "string" } } });
const executablePath = [process.env.GPUTRACE_BROWSER, "/usr/bin/chromium", "/usr/bin/google-chrome"].find((path) => path && existsSync(path));
const wrong = [], check = (is, words) => { if (!is) wrong.push(words); };
const server = spawn(options.gputrace, ["serve", trace], { stdio: ["ignore", "pipe", "inherit"] });
const address = await new Promise((done) => server.stdout.once("data", (bytes) => done(String(bytes).trim())));
const browser = await chromium.launch({ executablePath, args: ["--no-sandbox", "--disable-gpu"] });
const page = await (await browser.newContext({ viewport: { width: 1280, height: 800 } })).newPage(), said = [];
page.on("console", (message) => said.push(message.text()));
page.on("pageerror", (error) => said.push(String(error)));
page.on("request", (request) => { if (!request.url().startsWith(address)) said.push("asked for " + request.url()); });
await page.goto(address);
await page.waitForSelector("[data-section=verdict]");
const before = await page.evaluate(() => {
  const { view } = window.gputrace, [from, to] = view.extent, { head, changes } = view.dev, peak = view.dev.total[view.dev.peak];
  const window_ = [from + (to - from) * 0.4, from + (to - from) * 0.42];
  view.zoom(...window_);
  view.changed();
  return { n: head.n_changes, stretch: head.stretch, states: changes.length, peak, change: changes[view.cursor] };
});
check(before.stretch > 1, "the trace is so short that the page has all of it");
const begun = Date.now();
await page.waitForFunction(() => window.gputrace.view.dev.head.whole, null, { timeout: 300000 });
const after = await page.evaluate(() => {
  const { view } = window.gputrace, { changes, times, head } = view.dev, [from, to] = head.whole;
  const inside = [...changes].filter((_, i) => times[i] >= from && times[i] <= to);
  return { n: inside.length, span: inside.at(-1) - inside[0] + 1, peak: view.dev.total[view.dev.peak], change: changes[view.cursor], blocks: head.blocks.n_tiled, readout: document.querySelector(".timeline .readout").textContent };
});
check(after.n > 1 && after.n === after.span, `of ${after.span} changes of the part ${after.n} are there`);
check(after.peak === before.peak, `the peak is ${after.peak}, and was ${before.peak}`);
check(after.change === before.change, `the cursor was at change ${before.change}, and is at ${after.change}`);
check(/All changes of this part/.test(after.readout), `the page says: ${after.readout}`);
check(!said.length, `the console has: ${said.slice(0, 3).join(" | ")}`);
const memory = Number(/VmHWM:\s+(\d+)/.exec(readFileSync(`/proc/${server.pid}/status`, "utf8"))[1]);
console.log(`${before.n} changes, ${before.states} of them in the page; a fiftieth of the time, with its surroundings, has ${after.n}, after ${Date.now() - begun} ms; the server had at most ${Math.round(memory / 1024)} MiB`);
await browser.close();
server.kill();
wrong.forEach((words) => console.log("WRONG: " + words));
console.log(wrong.length ? "FAIL" : "PASS");
process.exitCode = wrong.length ? 1 : 0;
