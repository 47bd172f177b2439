// Opens pages in a real browser without a network, and holds every number in their tables against `gputrace summary --json` and
// `report --json`.
//
//   node test/browser.mjs --gputrace target/debug/gputrace [--shots FOLDER] [--browser /usr/bin/chromium] TRACE...
//
// A trace may be several, joined by commas: the ranks of a job. Exits with 1 where anything is wrong, 77 where there is no browser.
import { execFileSync } from "node:child_process";
import { existsSync, mkdirSync, mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { basename, join } from "node:path";
import { parseArgs } from "node:util";
import { chromium } from "playwright-core";
import { check, compare, isExample, keys, narrow, reach, reached, read, rememberClicks, rest, search, selection, states, tabs, wrong } from "./checks.mjs";

const { values: options, positionals: traces } = parseArgs({ allowPositionals: true, options: { gputrace: { type: "string" }, shots: { type: "string" }, browser: { type: "string" } } });
const browsers = [options.browser, process.env.GPUTRACE_BROWSER, "/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome"];
const executablePath = browsers.find((path) => path && existsSync(path));
if (!executablePath) {
  console.log("SKIPPED: no browser: install chromium, or name one in GPUTRACE_BROWSER");
  process.exit(77);
}
const gputrace = (...args) => execFileSync(options.gputrace, args, { encoding: "utf8", maxBuffer: 1 << 30, stdio: ["ignore", "pipe", "pipe"] });
const axe = readFileSync(new URL("../node_modules/axe-core/axe.min.js", import.meta.url), "utf8");

const folder = mkdtempSync(join(tmpdir(), "gputrace-page-"));
if (options.shots) mkdirSync(options.shots, { recursive: true });
const browser = await chromium.launch({ executablePath, args: ["--no-sandbox", "--disable-gpu", "--font-render-hinting=none"] });
let n = 0;

for (const trace of traces) {
  const paths = trace.split(","), name = basename(paths[0]).replace(/\..*/, ""), file = join(folder, name + ".html");
  gputrace("html", "-F", "-o", file, ...paths);
  const summary = JSON.parse(gputrace("summary", "--json", ...paths)), report = JSON.parse(gputrace("report", "--json", ...paths));
  const context = await browser.newContext({ offline: true, viewport: { width: 1280, height: 800 }, colorScheme: "light" });
  const page = await context.newPage(), said = [];
  page.setDefaultTimeout(1800000);
  page.on("console", (message) => said.push(message.text()));
  page.on("pageerror", (error) => said.push(String(error)));
  page.on("request", (request) => { if (!/^(file|data|blob):/.test(request.url())) said.push("asked the network: " + request.url()); });
  await page.addInitScript(rememberClicks);
  const begun = Date.now();
  await page.goto("file://" + file);
  await page.waitForSelector("[data-section=verdict]");
  const opened = Date.now() - begun;

  const before = n;
  let controls = 0;
  for (let chapter = 0; chapter < paths.length; chapter++) {
    await page.evaluate((chapter) => { const { view } = window.gputrace; view.choose(chapter, -1); view.tab = "tables"; view.changed(); }, chapter);
    await rest(page, 80);
    const shown = await page.evaluate(read);
    const told = report.processes[chapter];
    n += compare(name, shown, told, summary.processes[chapter]);
    n += await states(page, name, summary.processes[chapter]);
  }
  await keys(page, name);
  await search(page, name);
  n += await selection(page, name);
  if (isExample(name)) await reach(page, name);
  await narrow(page, name);
  await page.evaluate(() => { window.gputrace.view.restore(""); window.gputrace.view.by = "site"; window.gputrace.view.changed(); });
  for (const theme of ["light", "dark"]) {
    await page.emulateMedia({ colorScheme: theme });
    for (const tab of await page.$$eval("[role=tab]", (tabs) => tabs.map((tab) => tab.id))) {
      await page.click("#" + tab);
      await rest(page, 120);
      if (options.shots) {
        await page.evaluate((tab) => (tab === "tab-live" ? scrollTo(0, 0) : document.querySelector("[role=tablist]").scrollIntoView()), tab);
        await rest(page, 60);
        await page.screenshot({ path: join(options.shots, `${name}-${tab.slice(4)}-${theme}.png`) });
        if (tab === "tab-live") await page.screenshot({ path: join(options.shots, `${name}-full-${theme}.png`), fullPage: true });
      }
      if (theme === "light") controls += await tabs(page, name, tab.slice(4));
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
  console.log(`${name}: opened in ${opened} ms, ${n - before} numbers compared, ${controls} controls reached by Tab`);
  await context.close();
}
// Blocks are of the layers that `layers` finds, and hold what it says.
{
  const trace = new URL("../../tests/golden/predict/gpt.batch4.gtr", import.meta.url).pathname, file = join(folder, "layers.html");
  gputrace("html", "-F", "-o", file, trace);
  const [{ layers }] = JSON.parse(gputrace("layers", "--json", trace)).processes[0].sections;
  const page = await (await browser.newContext({ offline: true, viewport: { width: 1280, height: 800 } })).newPage();
  await page.goto("file://" + file);
  await page.waitForSelector("[data-section=verdict]");
  await page.keyboard.press("6");
  const shown = await page.evaluate(() => {
    const { view } = window.gputrace, { holders, head } = view.trace, { blocks } = view.dev.rectangles(), n = view.trace.marks.get("step").list.length;
    const held = (name, role) => Array.from({ length: blocks.n }, (_, i) => i).filter((i) => holders[blocks.what[i]].layer === name && holders[blocks.what[i]].role === role).reduce((sum, i) => sum + blocks.bytes[i] - blocks.spare[i], 0);
    return { by: view.by, list: head.layers.map((name) => ({ name, parameters: held(name, "parameters"), state: held(name, "optimizer state"), gradients: held(name, "gradients") / n })) };
  });
  const wanted = layers.slice(0, -1).map((it) => { const [by, name] = it.layer.split(/, (?=layer \d+$)/); return { name: `${name}, ${by}`, parameters: it.parameter_bytes, state: it.state_bytes, gradients: it.gradient_bytes }; });
  check(shown.by === "layer" && wanted.length > 1 && JSON.stringify(shown.list) === JSON.stringify(wanted), `layers: the page has ${JSON.stringify(shown)}, \`layers\` ${JSON.stringify(wanted)}`);
  if (options.shots) await page.screenshot({ path: join(options.shots, "layers.png") });
  console.log(`layers: ${wanted.length} of them hold what \`gputrace layers\` says`);
}
// What `predict` says of a range is drawn, in both themes, with its numbers where the mouse rests.
{
  const golden = new URL("../../tests/golden/predict/", import.meta.url).pathname, file = join(folder, "predicted.html");
  const asked = ["predict", `batch=16:${golden}resnet.batch16.gtr`, `batch=32:${golden}resnet.batch32.gtr`, "--at", "batch=16..256", "--limit", "12GiB"];
  gputrace(...asked, "--html", file);
  const { outcomes, runs } = JSON.parse(gputrace(...asked, "--json"));
  const page = await (await browser.newContext({ offline: true, viewport: { width: 1280, height: 800 } })).newPage(), said = [];
  page.on("console", (message) => said.push(message.text()));
  page.on("pageerror", (error) => said.push(String(error)));
  await page.goto("file://" + file);
  await page.waitForSelector("[data-section=verdict]");
  await page.click("#tab-tables");
  const curve = page.locator(".chart > .curve"), titles = await curve.locator("circle title").allTextContents();
  check(await curve.count() === 1 && titles.length === outcomes.length, `predicted: ${titles.length} points of ${outcomes.length}`);
  titles.forEach((title, i) => check(title.startsWith(`batch=${outcomes[i].values.batch}: `) && title.includes(outcomes[i].needed_reserved_bytes > outcomes[i].room_bytes ? "more than" : "within"), `predicted: ${title}`));
  check(await curve.locator("rect.recorded").count() === runs.length, "predicted: runs that were recorded");
  for (const theme of ["light", "dark"]) {
    await page.emulateMedia({ colorScheme: theme });
    await curve.scrollIntoViewIfNeeded();
    const colour = await curve.evaluate((element) => [".best", ".range", "polyline.ceiling", "text"].map((name) => { const it = getComputedStyle(element.querySelector(name)); return name === "text" ? it.fill : name === ".range" ? it.fill : it.stroke; }));
    check(new Set(colour).size >= 3 && !colour.includes("none"), `predicted ${theme}: ${colour}`);
    await page.evaluate(axe);
    const found = await page.evaluate(() => axe.run(document, { resultTypes: ["violations"] }));
    for (const it of found.violations) check(false, `predicted ${theme}: axe: ${it.id}: ${it.nodes[0].html.slice(0, 160)}`);
    if (options.shots) await page.screenshot({ path: join(options.shots, `predicted-${theme}.png`) });
  }
  check(!said.filter((text) => !/axe/.test(text)).length, `predicted: the console has: ${said.slice(0, 3).join(" | ")}`);
  console.log(`predicted: ${titles.length} points of a curve`);
}
await browser.close();
rmSync(folder, { recursive: true });
if (reached.length) console.log("faulty lines: " + reached.join("; "));
check(n > 0, "no number was compared");
wrong.forEach((words) => console.log("WRONG: " + words));
console.log(wrong.length ? `FAIL: ${wrong.length} things are wrong` : `PASS: ${n} numbers of ${traces.length} pages are those of --json`);
process.exitCode = wrong.length ? 1 : 0;
