// Every view of five traces at 1280 x 800, light and dark, against the pictures that somebody looked at.
//
//   node test/pictures.mjs --gputrace target/debug/gputrace [--keep] [--shots FOLDER] [--browser /usr/bin/chromium]
//
// What is kept is a quarter as wide and high: the mean of 16 pixels is the same where only the edge of a letter is drawn otherwise.
// --keep writes them anew (look at them: --shots writes them whole). Exits with 1 where one differs, 77 where there is no browser or
// it has other letters.
import { execFileSync } from "node:child_process";
import { existsSync, mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join, resolve } from "node:path";
import { fileURLToPath } from "node:url";
import { parseArgs } from "node:util";
import { chromium } from "playwright-core";

/** A leak, an error, CUDA graphs in private pools, a job of two, and a snapshot of PyTorch's own. */
const TRACES = {
  leak: ["tests/golden/kept-losses.gtr"], error: ["tests/golden/caught-oom.gtr"], pools: ["tests/golden/pools/graphs.gtr"],
  job: ["tests/golden/kept-losses.gtr", "tests/golden/running-total.gtr"], snapshot: ["tests/groundtruth/gpt_grow.default.pickle.gz"],
};
/** A cell differs where a colour of it is further away than this, of 255. */
const NEAR = 20;
/** So many cells of a hundred may differ. */
const MOST = 0.5;

const { values: options } = parseArgs({ options: { gputrace: { type: "string" }, keep: { type: "boolean" }, shots: { type: "string" }, browser: { type: "string" } } });
const executablePath = [options.browser, process.env.GPUTRACE_BROWSER, "/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome"].find((path) => path && existsSync(path));
const skipped = (why) => { console.log("SKIPPED: " + why); process.exit(77); };
if (!executablePath) skipped("no browser: install chromium, or name one in GPUTRACE_BROWSER");
const root = fileURLToPath(new URL("../../", import.meta.url)), kept = fileURLToPath(new URL("pictures/", import.meta.url)), folder = mkdtempSync(join(tmpdir(), "gputrace-pictures-"));
for (const path of [kept, options.shots]) if (path) mkdirSync(path, { recursive: true });
const browser = await chromium.launch({ executablePath, args: ["--no-sandbox", "--disable-gpu", "--font-render-hinting=none", "--force-color-profile=srgb"] });
const context = await browser.newContext({ offline: true, viewport: { width: 1280, height: 800 } });
const desk = await context.newPage();

const letters = await desk.evaluate(() => {
  const pen = document.createElement("canvas").getContext("2d");
  return ["system-ui", "monospace"].map((font) => { pen.font = "100px " + font; return pen.measureText("gputrace 0123 MiB").width.toFixed(0); }).join();
});
const fonts = join(kept, "letters.txt");
if (options.keep) writeFileSync(fonts, letters + "\n");
else if (readFileSync(fonts, "utf8").trim() !== letters) { await browser.close(); skipped("letters are of another width here than where the pictures were made"); }

const wrong = [];
let n = 0;
for (const [name, traces] of Object.entries(TRACES)) {
  const file = join(folder, name + ".html");
  // From the root, so that the names of files are the same everywhere.
  execFileSync(resolve(options.gputrace), ["html", "-F", "-o", file, ...traces], { cwd: root, stdio: "pipe" });
  const page = await context.newPage();
  page.setDefaultTimeout(0);
  await page.goto("file://" + file);
  await page.waitForSelector("[data-section=verdict]");
  for (const theme of ["light", "dark"]) {
    await page.emulateMedia({ colorScheme: theme });
    for (const tab of ["verdict", ...(await page.$$eval("[role=tab]", (tabs) => tabs.map((tab) => tab.id.slice(4))))]) {
      await page.evaluate((tab) => {
        const { view } = window.gputrace;
        view.tab = tab === "verdict" ? "live" : tab;
        view.changed();
        if (tab === "verdict") scrollTo(0, 0); else document.querySelector("[role=tablist]").scrollIntoView();
      }, tab);
      const shot = await atRest(page), called = `${name}-${tab}-${theme}.png`;
      if (options.shots) writeFileSync(join(options.shots, called), shot);
      const small = await desk.evaluate(shrunk, shot.toString("base64"));
      if (options.keep) writeFileSync(join(kept, called), Buffer.from(small, "base64"));
      else if (!existsSync(join(kept, called))) wrong.push(`${called} is new: --keep keeps it`);
      else {
        const share = await desk.evaluate(difference, [small, readFileSync(join(kept, called)).toString("base64"), NEAR]);
        if (share > MOST) wrong.push(`${called}: ${share.toFixed(1)} % of it looks otherwise`);
      }
      n++;
    }
  }
  await page.close();
}
await browser.close();
rmSync(folder, { recursive: true });
wrong.forEach((words) => console.log("WRONG: " + words));
console.log(wrong.length ? `FAIL: ${wrong.length} of ${n} pictures differ; --shots FOLDER shows them` : `PASS: ${n} pictures ${options.keep ? "kept" : "are those that are kept"}`);
process.exitCode = wrong.length ? 1 : 0;

/** A picture that is no other a moment later, however busy the machine is. */
async function atRest(page) {
  for (let before = null; ; ) {
    await page.evaluate(() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 120)))));
    const shot = await page.screenshot();
    if (before && shot.equals(before)) return shot;
    before = shot;
  }
}

/** In a browser: a quarter as wide and high, each cell the mean of its pixels. */
async function shrunk(picture) {
  const image = new Image();
  image.src = "data:image/png;base64," + picture;
  await image.decode();
  const whole = new OffscreenCanvas(image.width, image.height).getContext("2d");
  whole.drawImage(image, 0, 0);
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [image.width / 4, image.height / 4];
  const small = canvas.getContext("2d"), from = whole.getImageData(0, 0, image.width, image.height).data, to = small.createImageData(canvas.width, canvas.height);
  for (let y = 0; y < canvas.height; y++) for (let x = 0; x < canvas.width; x++) for (let c = 0; c < 3; c++) {
    let sum = 0;
    for (let dy = 0; dy < 4; dy++) for (let dx = 0; dx < 4; dx++) sum += from[((y * 4 + dy) * image.width + x * 4 + dx) * 4 + c];
    // In steps of eight: half the bytes.
    to.data[(y * canvas.width + x) * 4 + c] = Math.min(255, Math.round(sum / 16 / 8) * 8);
  }
  for (let i = 3; i < to.data.length; i += 4) to.data[i] = 255;
  small.putImageData(to, 0, 0);
  return canvas.toDataURL("image/png").split(",")[1];
}

/** In a browser: of a hundred cells, how many are not near to each other. */
async function difference([one, other, near]) {
  const [a, b] = await Promise.all([one, other].map(async (picture) => {
    const image = new Image();
    image.src = "data:image/png;base64," + picture;
    await image.decode();
    const pen = new OffscreenCanvas(image.width, image.height).getContext("2d");
    pen.drawImage(image, 0, 0);
    return pen.getImageData(0, 0, image.width, image.height);
  }));
  if (a.width !== b.width || a.height !== b.height) return 100;
  let far = 0;
  for (let i = 0; i < a.data.length; i += 4) far += [0, 1, 2].some((c) => Math.abs(a.data[i + c] - b.data[i + c]) > near) ? 1 : 0;
  return (100 * far * 4) / a.data.length;
}
