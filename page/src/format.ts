// Amounts in words, as the reports in a terminal have them (replay/trace/src/words.rs).
import type { Cell } from "./data";

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];

export function bytes(value: number): string {
  let size = Math.abs(value), unit = 0;
  while (size >= 1023.995 && unit < UNITS.length - 1) { size /= 1024; unit++; }
  const sign = value < 0 ? "\u2212" : "";
  return sign + (unit ? size.toFixed(2) : String(size)) + " " + UNITS[unit];
}

export function difference(value: number): string {
  return (value > 0 ? "+" : "") + bytes(value);
}

export function count(value: number): string {
  return String(value).replace(/\B(?=(\d{3})+$)/g, ",");
}

export function time(ns: number): string {
  if (ns < 1e3) return ns + " ns";
  if (ns < 1e6) return (ns / 1e3).toFixed(1) + " \u00b5s";
  if (ns < 1e9) return (ns / 1e6).toFixed(1) + " ms";
  if (ns < 6e11) return (ns / 1e9).toFixed(3) + " s";
  const s = Math.floor(ns / 1e9), two = (n: number) => String(n).padStart(2, "0");
  return `${Math.floor(s / 3600)}:${two(Math.floor(s / 60) % 60)}:${two(s % 60)} h`;
}

export function share(value: number): string {
  return (value * 100).toFixed(1) + " %";
}

/** What is shown of a value, and the value itself for sorting and for tests. */
export function cell(value: Cell): [string, number | string | null] {
  if (value === null) return ["", null];
  if (typeof value === "string") return [value, value];
  if (value.b !== undefined) return [bytes(value.b), value.b];
  if (value.d !== undefined) return [difference(value.d), value.d];
  if (value.n !== undefined) return [count(value.n), value.n];
  if (value.t !== undefined) return [time(value.t), value.t];
  if (value.s !== undefined) return [share(value.s), value.s];
  return [value.c ?? "", value.c ?? null];
}

/** Round numbers from 0 to about `most`, at most `n` of them; of bytes by powers of two. */
export function ticks(from: number, to: number, n: number, isBytes: boolean): number[] {
  if (!(to > from)) return [];
  let step: number;
  if (isBytes) {
    step = 2 ** Math.ceil(Math.log2((to - from) / n));
  } else {
    const raw = (to - from) / n, ten = 10 ** Math.floor(Math.log10(raw));
    step = [1, 2, 5, 10].map((m) => m * ten).find((s) => s >= raw)!;
  }
  const ticks = [];
  for (let at = Math.ceil(from / step) * step; at <= to; at += step) ticks.push(at);
  return ticks;
}

export function tickBytes(value: number): string {
  return bytes(value).replace(/\.00 /, " ").replace(/(\.\d)0 /, "$1 ");
}

export function tickTime(ns: number, step: number, last: number): string {
  // Seconds stay seconds while four digits behind them tell the labels apart: so the readout has them.
  const [unit, scale] = step >= 1e9 || (last >= 1e9 && step >= 1e5) ? ["s", 1e9] : step >= 1e6 ? ["ms", 1e6] : step >= 1e3 ? ["\u00b5s", 1e3] : ["ns", 1];
  const digits = Math.max(0, Math.min(4, -Math.floor(Math.log10(step / (scale as number)) + 1e-9)));
  return (ns / (scale as number)).toFixed(digits) + " " + unit;
}
