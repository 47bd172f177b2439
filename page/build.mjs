// Builds the page's code and style, minified, with the hashes that its policy names them by. With --check, compares them with what
// is committed; with --tests, builds the unit tests.
import { build } from "esbuild";
import { createHash } from "node:crypto";
import { readFileSync, writeFileSync, readdirSync } from "node:fs";
import { gzipSync } from "node:zlib";

const here = new URL("./", import.meta.url).pathname, room = here + "../replay/page/src/";
const common = { absWorkingDir: here, bundle: true, write: false, charset: "ascii", legalComments: "none", logLevel: "warning" };

if (process.argv.includes("--tests")) {
  const entryPoints = readdirSync(here + "test").filter((name) => name.endsWith(".test.ts")).map((name) => "test/" + name);
  await build({ ...common, write: true, entryPoints, outdir: here + "test/out", format: "esm", platform: "node", outExtension: { ".js": ".mjs" } });
  process.exit(0);
}

const made = async (entry, options) => (await build({ ...common, entryPoints: [entry], minify: true, ...options })).outputFiles[0].text.trimEnd();
const script = await made("src/app.ts", { format: "iife", target: "es2022" });
const style = await made("src/style.css", { target: "chrome118" });
const hash = (text) => "sha256-" + createHash("sha256").update(text).digest("base64");
const files = { "bundle.js": script, "bundle.css": style, "bundle.sha256": `${hash(script)}\n${hash(style)}\n` };

const size = gzipSync(script + style).length;
if (size > 150_000) throw new Error(`the page's code has ${size} bytes when compressed; 150,000 are the limit`);
for (const [name, text] of Object.entries(files)) {
  if (!process.argv.includes("--check")) writeFileSync(room + name, text);
  else if (readFileSync(room + name, "utf8") !== text) throw new Error(`replay/page/src/${name} is not what page/ gives: run \`make page\``);
}
console.log(`${script.length + style.length} bytes, ${size} when compressed`);
