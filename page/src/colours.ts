// Colours that most people can tell apart (Okabe and Ito, 2008), one for each owner or group; grey is what is unused or unknown.

/** Pale on every ground. */
const UNUSED = "unused";
const NAMED: Record<string, string> = {
  PyTorch: "#0072b2", "PyTorch, unused": UNUSED, NCCL: "#7f9c3b", cuBLAS: "#a6761d", cuDNN: "#aa3377", "CUDA runtime": "#999999",
  parameters: "#0072b2", weights: "#0072b2", gradients: "#009e73", "optimizer state": "#e69f00", activations: "#56b4e9",
  "activations of inference": "#56b4e9", temporaries: "#cc79a7", "KV cache": "#d55e00", workspaces: "#f0e442", "other, kept": "#8c6bb1",
  "unknown (held long)": "#999999", "no role": "#999999", "in no layer": "#999999",
  "PyTorch's unused cache": UNUSED, "(reserved by PyTorch, used by nobody)": UNUSED,
};
const OTHERS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#8c6bb1", "#7f9c3b", "#a6761d", "#aa3377"];
/** What grew and what shrank: no owner has these. */
export const GREW = "#b2182b", SHRANK = "#2166ac";
export const REST = "#8d8d8d";

/** From the first layer to the last. */
const RAMP = ["#3b4cc0", "#1f87b4", "#2a9d8f", "#7aa834", "#d9a520", "#d1622b"];

/** Between two colours. */
function between(one: string, other: string, part: number): string {
  return "#" + [1, 3, 5].map((at) => { const [a, b] = [one, other].map((it) => parseInt(it.slice(at, at + 2), 16)); return Math.round(a + (b - a) * part).toString(16).padStart(2, "0"); }).join("");
}

/** Where so much of the ramp is passed; of two neighbours one is paler. */
function layerColour(index: number, n: number): string {
  const at = (index / Math.max(1, n - 1)) * (RAMP.length - 1), before = Math.min(RAMP.length - 2, Math.floor(at)), colour = between(RAMP[before], RAMP[before + 1], at - before);
  return index % 2 ? between(colour, "#ffffff", 0.28) : colour;
}

/** A colour for each of these names, no two the same. */
export function colours(names: string[]): string[] {
  const taken = new Set<string>(), unused = theme().unused, layers = names.filter((name) => /^layer \d/.test(name));
  const given = names.map((name) => {
    if (layers.includes(name)) return layerColour(layers.indexOf(name), layers.length);
    const colour = NAMED[name] === UNUSED ? unused : NAMED[name];
    if (!colour || taken.has(colour)) return "";
    taken.add(colour);
    return colour;
  });
  const free = OTHERS.filter((colour) => !taken.has(colour));
  return given.map((colour, i) => colour || (/^\d+ others$/.test(names[i]) ? REST : free.shift() ?? REST));
}

/** Colours of the page, as they are now. */
export function theme() {
  const style = getComputedStyle(document.documentElement), of = (name: string) => style.getPropertyValue(name).trim();
  return { ink: of("--ink"), soft: of("--soft"), line: of("--line"), back: of("--back"), panel: of("--panel"), accent: of("--accent"), bad: of("--bad"), good: of("--good"), free: of("--free"), empty: of("--empty"), pool: of("--pool"), unused: of("--unused"), hatch: of("--hatch") };
}

/** Whether dark text is read better on it. */
export function isLight(colour: string): boolean {
  const [r, g, b] = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
  return 0.299 * r + 0.587 * g + 0.114 * b > 140;
}
