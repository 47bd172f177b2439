// The axis that all pictures over time share: time, changes of memory, or steps of training of equal width.
import { count, tickTime, ticks } from "./format";
import type { View } from "./view";

/** Where an axis of this width has labels, and which. */
export function axisLabels(view: View, width: number): [number, string][] {
  const [from, to] = view.window, n = Math.max(3, Math.floor(width / 130));
  if (view.axis === "step") {
    const steps = view.trace.steps, label = (at: number) => (at < 0 ? "before" : at >= steps.length ? "after" : steps[at].text);
    let every = 1;
    for (const wanted of [2, 5, 10, 20, 50, 100, 200, 500, 1000]) if ((to - from) / every > n) every = wanted;
    const labels: [number, string][] = [];
    for (let at = Math.ceil(from / every) * every; at <= to; at += every) labels.push([at, label(at)]);
    return labels;
  }
  const marks = ticks(from, to, n, false), step = marks.length > 1 ? marks[1] - marks[0] : to - from;
  return marks.map((at) => [at, view.axis === "time" ? tickTime(at, step, marks.at(-1)!) : "change " + count(Math.round(at))]);
}
