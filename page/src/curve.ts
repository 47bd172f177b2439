// What a prediction says of a range of values: bytes over a variable, with the range as an area, the runs that were recorded, and
// the limit. The table beside it has every number: to those who do not see it the picture is its title.
import { bytes, count, tickBytes, ticks } from "./format";
import type { Chart } from "./data";

const WIDTH = 760, HEIGHT = 260, LEFT = 76, RIGHT = 24, TOP = 14, BOTTOM = 40;
/** A range further above the best guess leaves the picture, and a ceiling further above all of it is named alone: as in a terminal. */
const MOST_RANGE = 3, MOST_CEILING = 2;

export interface Shape { area: string; line: string; ceiling: string | null; x: (at: number) => number; y: (value: number) => number; top: number; from: number; to: number; isCut: boolean }

/** Where everything lies: corners as `x,y x,y`. */
export function shape(chart: Chart): Shape {
  const { points, recorded } = chart, at = [...points.map((it) => it.at), ...recorded.map(([at]) => at)];
  const [from, to] = [Math.min(...at), Math.max(...at)];
  const best = Math.max(...points.map((it) => it.best), ...recorded.map(([, value]) => value), 1), high = Math.max(...points.map((it) => it.high));
  const drawn = Math.max(best, Math.min(high, best * MOST_RANGE));
  const room = chart.ceiling === null ? null : Math.max(...points.map((it) => it.room ?? 0));
  const isShown = room !== null && room <= drawn * MOST_CEILING, top = Math.max(drawn, isShown ? room : 0) * 1.06;
  const x = (at: number) => LEFT + ((at - from) / (to - from || 1)) * (WIDTH - LEFT - RIGHT);
  const y = (value: number) => HEIGHT - BOTTOM - (Math.min(value, top) / top) * (HEIGHT - TOP - BOTTOM);
  const corner = (at: number, value: number) => `${x(at).toFixed(1)},${y(value).toFixed(1)}`;
  const low = points.map((it) => corner(it.at, it.is_certain ? it.best : it.low)), up = points.map((it) => corner(it.at, it.is_certain ? it.best : it.high));
  const limit = points.map((it) => corner(it.at, it.room ?? 0));
  return {
    area: [...low, ...up.reverse()].join(" "), line: points.map((it) => corner(it.at, it.best)).join(" "),
    ceiling: isShown ? [`${LEFT},${limit[0].split(",")[1]}`, ...limit].join(" ") : null, x, y, top, from, to, isCut: high > top,
  };
}

/** What is said of a point where the mouse rests on it. */
export function words(chart: Chart, index: number): string {
  const { at, low, best, high, is_certain, room } = chart.points[index];
  const range = is_certain ? `${bytes(best)}, certain` : `${bytes(best)}, at least ${bytes(low)}, at most ${bytes(high)}`;
  const fits = chart.ceiling === null || room === null ? "" : `; ${best > room ? "more than" : "within"} the ${bytes(room)} that ${chart.ceiling} leaves`;
  return `${chart.variable}=${at}: ${range}${fits}`;
}

/** Values of the variable that can be written below the axis: the last, the first, and those between for which there is room. */
export function labelled(values: number[], x: (at: number) => number): number[] {
  const kept: number[] = [];
  for (const at of [values.at(-1)!, values[0], ...values]) if (kept.every((it) => Math.abs(x(it) - x(at)) >= 10 + 4 * (String(it).length + String(at).length))) kept.push(at);
  return kept.sort((a, b) => a - b);
}

type Attributes = Record<string, string | number>;
function s(tag: string, attributes: Attributes, ...children: (Node | string)[]): SVGElement {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
  element.append(...children);
  return element;
}

/** The picture. */
export function curve(chart: Chart): HTMLElement {
  const { area, line, ceiling, x, y, top, from, to, isCut } = shape(chart), parts: SVGElement[] = [], base = HEIGHT - BOTTOM;
  for (const at of ticks(0, top, 5, true)) {
    parts.push(s("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(at), y2: y(at) }));
    parts.push(s("text", { x: LEFT - 8, y: y(at) + 4, "text-anchor": "end" }, tickBytes(at)));
  }
  for (const at of labelled([...new Set([...chart.recorded.map(([at]) => at), ...chart.points.map((it) => it.at)])].sort((a, b) => a - b), x)) {
    parts.push(s("text", { x: x(at), y: base + 16, "text-anchor": "middle" }, String(at)));
  }
  parts.push(s("text", { x: (LEFT + WIDTH - RIGHT) / 2, y: HEIGHT - 6, "text-anchor": "middle" }, chart.variable));
  parts.push(s("polygon", { class: "range", points: area }));
  if (ceiling) parts.push(s("polyline", { class: "ceiling", points: ceiling }));
  parts.push(s("polyline", { class: "best", points: line }));
  chart.points.forEach((it, index) => parts.push(s("circle", { class: "best", cx: x(it.at), cy: y(it.best), r: chart.points.length > 32 ? 2 : 4 }, s("title", {}, words(chart, index)))));
  for (const [at, value] of chart.recorded) {
    parts.push(s("rect", { class: "recorded", x: x(at) - 4, y: y(value) - 4, width: 8, height: 8 }, s("title", {}, `recorded at ${chart.variable}=${at}: ${bytes(value)}`)));
  }
  if (ceiling && chart.ceiling !== null) parts.push(s("text", { class: "ceiling", x: LEFT + 6, y: y(chart.points[0].room ?? 0) - 5 }, chart.ceiling));
  const label = `${chart.chart}: ${count(chart.points.length)} values from ${from} to ${to}. The table has the numbers.`;
  const picture = s("svg", { class: "curve", role: "img", "aria-label": label, viewBox: `0 0 ${WIDTH} ${HEIGHT}` }, ...parts);
  const signs: [string, string][] = [["best", "predicted"]];
  if (chart.recorded.length) signs.push(["recorded", "recorded"]);
  if (chart.points.some((it) => !it.is_certain)) signs.push(["range", "at least to at most" + (isCut ? `, up to ${bytes(Math.max(...chart.points.map((it) => it.high)))}, above the picture` : "")]);
  if (chart.ceiling !== null) signs.push(["ceiling", chart.ceiling + (ceiling ? "" : ", above the picture")]);
  const figure = document.createElement("figure"), caption = document.createElement("figcaption");
  figure.className = "chart";
  caption.append(chart.chart, ...signs.map(([name, text]) => {
    const sign = document.createElement("span");
    sign.className = "sign";
    sign.append(s("svg", { class: "curve", viewBox: "0 0 16 10", "aria-hidden": "true" }, key(name)), text);
    return sign;
  }));
  figure.append(caption, picture);
  return figure;
}

function key(name: string): SVGElement {
  if (name === "range") return s("rect", { class: name, width: 16, height: 10 });
  if (name === "recorded") return s("rect", { class: name, x: 4, y: 1, width: 8, height: 8 });
  if (name === "ceiling") return s("polyline", { class: name, points: "0,5 16,5" });
  return s("g", {}, s("polyline", { class: name, points: "0,5 16,5" }), s("circle", { class: name, cx: 8, cy: 5, r: 3 }));
}
