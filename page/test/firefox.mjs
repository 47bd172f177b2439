// The same numbers in Firefox as in Chromium, without a network: stock Firefox, by WebDriver BiDi.
//
//   node --experimental-websocket test/firefox.mjs --gputrace target/debug/gputrace [--browser firefox-esr] TRACE...
//
// Exits with 1 where anything is wrong, 77 where there is no Firefox.
import { execFileSync, spawn } from "node:child_process";
import { existsSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { basename, join } from "node:path";
import { parseArgs } from "node:util";
import { check, compare, keys, read, rememberClicks, states, tabs, wrong } from "./checks.mjs";

const { values: options, positionals: traces } = parseArgs({ allowPositionals: true, options: { gputrace: { type: "string" }, browser: { type: "string" }, shot: { type: "string" } } });
const executable = [options.browser, process.env.GPUTRACE_FIREFOX, "/usr/bin/firefox-esr", "/usr/bin/firefox"].find((path) => path && existsSync(path));
if (!executable) {
  console.log("SKIPPED: no Firefox: install firefox-esr, or name one in GPUTRACE_FIREFOX");
  process.exit(77);
}
const folder = mkdtempSync(join(tmpdir(), "gputrace-firefox-"));
const gputrace = (...args) => execFileSync(options.gputrace, args, { encoding: "utf8", maxBuffer: 1 << 30, stdio: ["ignore", "pipe", "pipe"] });
const axe = readFileSync(new URL("../node_modules/axe-core/axe.min.js", import.meta.url), "utf8");
const browser = spawn(executable, ["--headless", "--no-remote", "--profile", folder, "--remote-debugging-port", "0", "about:blank"], { stdio: ["ignore", "ignore", "pipe"], env: { ...process.env, HOME: folder } });
const address = await new Promise((done, failed) => {
  let said = "";
  browser.stderr.on("data", (bytes) => { said += bytes; const found = /WebDriver BiDi listening on (ws:\S+)/.exec(said); if (found) done(found[1]); });
  browser.on("exit", () => failed(new Error(said.slice(-500))));
});
const socket = new WebSocket(address + "/session"), waiting = new Map(), said = [];
await new Promise((done, failed) => { socket.onopen = done; socket.onerror = failed; });
socket.onmessage = ({ data }) => {
  const message = JSON.parse(data), handlers = waiting.get(message.id);
  if (message.method === "log.entryAdded") said.push(`${message.params.level}: ${message.params.text}`);
  else if (message.method === "network.beforeRequestSent" && !/^(file|data|blob|about|resource|chrome):/.test(message.params.request.url)) said.push("asked the network: " + message.params.request.url);
  else if (handlers) (message.type === "error" ? handlers[1](new Error(message.message)) : handlers[0](message.result));
};
let id = 0;
const send = (method, params) => new Promise((done, failed) => { waiting.set(++id, [done, failed]); socket.send(JSON.stringify({ id, method, params })); });
await send("session.new", { capabilities: {} });
await send("session.subscribe", { events: ["log.entryAdded", "network.beforeRequestSent"] });
await send("script.addPreloadScript", { functionDeclaration: String(rememberClicks) });
const { contexts: [{ context }] } = await send("browsingContext.getTree", {});
await send("browsingContext.setViewport", { context, viewport: { width: 1280, height: 800 } });
/** Keys that have no letter, as WebDriver writes them. */
const KEYS = { Escape: "\uE00C", Enter: "\uE007", Tab: "\uE004", ArrowLeft: "\uE012", ArrowUp: "\uE013", ArrowRight: "\uE014", ArrowDown: "\uE015" };
/** Of a page of playwright's what the checks use. */
const page = {
  keyboard: {
    press: (key) => send("input.performActions", { context, actions: [{ type: "key", id: "keys", actions: ["keyDown", "keyUp"].map((type) => ({ type, value: KEYS[key] ?? key })) }] }),
  },
  async evaluate(code, argument) {
    const expression = typeof code === "string" ? code : `(async () => JSON.stringify(await (${code})(${JSON.stringify(argument) ?? ""})) ?? null)()`;
    const { result, exceptionDetails } = await send("script.evaluate", { expression, target: { context }, awaitPromise: true });
    if (exceptionDetails) throw new Error(exceptionDetails.text);
    return typeof code !== "string" && result.value !== undefined ? JSON.parse(result.value) : null;
  },
};

let n = 0;
for (const trace of traces) {
  const name = basename(trace).replace(/\..*/, ""), file = join(folder, name + ".html");
  gputrace("html", "-F", "-o", file, trace);
  const summary = JSON.parse(gputrace("summary", "--json", trace)), report = JSON.parse(gputrace("report", "--json", trace)), before = n;
  await send("browsingContext.navigate", { context, url: "file://" + file, wait: "complete" });
  await page.evaluate(() => new Promise((done) => { const look = () => (document.querySelector("[data-section=verdict]") ? done(1) : setTimeout(look, 20)); look(); }));
  await page.evaluate(() => { const { view } = window.gputrace; view.choose(0, -1); view.tab = "tables"; view.changed(); });
  n += compare(name, await page.evaluate(read), report.processes[0], summary.processes[0]);
  n += await states(page, name, summary.processes[0]);
  await keys(page, name);
  let controls = 0;
  for (const tab of ["live", "map", "settings", "tables"]) {
    await page.evaluate(async (tab) => { const { view } = window.gputrace; view.tab = tab; view.changed(); await new Promise((done) => setTimeout(done, 100)); }, tab);
    controls += await tabs(page, name, tab);
  }
  await page.evaluate(axe);
  for (const theme of ["light", "dark"]) {
    for (const tab of ["live", "map", "settings", "tables"]) {
      const wide = await page.evaluate(async ([theme, tab]) => { const { view } = window.gputrace; document.documentElement.dataset.theme = theme; view.tab = tab; view.changed(); await new Promise((done) => setTimeout(done, 100)); return document.documentElement.scrollWidth; }, [theme, tab]);
      check(wide <= 1280, `${name} ${tab}: ${wide} pixels wide, where 1280 are there`);
      const found = await page.evaluate(async () => (await axe.run(document, { resultTypes: ["violations"] })).violations.map((it) => `${it.id}: ${it.nodes[0].html.slice(0, 160)}`));
      for (const it of found) check(false, `${name} ${tab} ${theme}: axe: ${it}`);
    }
  }
  const words = said.splice(0).filter((text) => !/axe/.test(text));
  check(!words.length, `${name}: the console has: ${words.slice(0, 3).join(" | ")}`);
  console.log(`${name}: ${n - before} numbers compared in Firefox, ${controls} controls reached by Tab`);
}
if (options.shot) writeFileSync(options.shot, Buffer.from((await send("browsingContext.captureScreenshot", { context })).data, "base64"));
socket.close();
browser.kill();
await new Promise((done) => { if (browser.exitCode !== null || browser.signalCode !== null) done(); else browser.on("exit", done); });
rmSync(folder, { recursive: true, force: true });
check(n > 0, "no number was compared");
wrong.forEach((words) => console.log("WRONG: " + words));
console.log(wrong.length ? `FAIL: ${wrong.length} things are wrong` : `PASS: ${n} numbers of ${traces.length} pages in Firefox are those of --json`);
process.exitCode = wrong.length ? 1 : 0;
