// What the page opens on: the view that shows what the verdict says, with its line selected, and a line of words about it.
import type { Text } from "./data";
import { bytes, count } from "./format";
import { LEVEL, type Device, type Mark } from "./model";
import type { Pick } from "./pick";
import type { View } from "./view";

/** The line that the verdict names; null where it names none that holds memory here. */
export function lineOf(view: View): Extract<Pick, { kind: "line" }> | null {
  const items = view.trace.head.report.verdict?.section.items ?? [], site = items.find((item) => "fact" in item && item.fact === "call_site");
  if (!site || !("fact" in site) || typeof site.value !== "string") return null;
  const text = site.value, { sites } = view.trace.head, device = view.dev;
  if (sites.includes(text) && view.trace.holders.some((holder) => holder.site === text)) return { kind: "line", text };
  // Not a call site itself: a frame of some stack, by its file and line.
  const place = /([^/()]+:\d+)\)/.exec(text)?.[1];
  return place && device && view.trace.holders.some((holder) => view.trace.stackOf(holder).some((line) => line.includes(`(${place})`))) ? { kind: "line", text: `(${place})` } : null;
}

/** Of the calls that emptied the cache at the line that the verdict names, the one that released most. */
export function emptiedAt(view: View): Mark | null {
  const site = view.trace.head.report.verdict?.section.items.find((item) => "fact" in item && item.fact === "call_site");
  const place = site && "fact" in site && typeof site.value === "string" ? /[^/()]+:\d+\)/.exec(site.value)?.[0] : undefined;
  const list = place ? (view.trace.marks.get("cache emptied")?.list ?? []).filter((mark) => mark.text.includes(place) && mark.device === view.dev?.head.device) : [];
  return list.reduce<Mark | null>((best, mark) => (mark.bytes > (best?.bytes ?? -1) ? mark : best), null);
}

/** Opens on the verdict's evidence. */
export function evidence(view: View) {
  const told = view.trace.head.report.verdict, device = view.dev;
  view.by = view.trace.head.roles.length && view.trace.holders.some((holder) => holder.level === 1 && holder.role !== "no role") ? "role" : "site";
  const job = view.data.head.job.find((section) => section.items[0] && "mood" in section.items[0] && ["bad", "warning"].includes((section.items[0] as Text).mood));
  if (job && view.chapters.length > 1) view.tab = "ranks";
  if (!device?.n) return;
  // Of an allocator that takes most of the card at once, only what it handed out is worth the height.
  view.hidesUnused = view.trace.holders.some((holder) => holder.level === LEVEL.arena) && device.used[device.peak] * 2 < device.total[device.peak];
  const line = lineOf(view), steps = view.trace.steps.length > 2 ? "step" as const : "change" as const;
  const fits = () => { view.window = view.fit = stepsOnly(view, device); };
  switch (told?.kind) {
    case "grew": {
      if (!line) return;
      [view.pick, view.isAlone] = [line, true];
      view.by = "site";
      view.setAxis(steps);
      fits();
      const { picked } = view;
      if (picked) view.put(picked.bytes.reduce((best, value, state) => (value > picked.bytes[best] ? state : best), 0));
      view.caption = "The growing line alone: every band is a block that it made. Bands that run on to the right are still held.";
      return;
    }
    case "out_of_memory": {
      const oom = view.trace.marks.get("out of memory")?.list.findLast((mark) => mark.device < 0 || mark.device === device.head.device);
      if (!oom) return;
      const state = Math.max(0, device.at(oom.from));
      view.setAxis("change");
      const at = device.changes[state], from = beginning(device, state), wide = Math.max(at - from, 8);
      view.zoom(at - wide, at + wide / 8);
      view.fit = view.window;
      view.put(state);
      view.pick = line;
      // A line that held nothing then is the one whose request was refused.
      const holds = !!view.picked?.bytes[state];
      if (!holds) view.pick = { kind: "mark", of: oom.kind, from: oom.from };
      view.hasLines = (view.data.head.summary.processes?.[view.chapter]?.devices.find((it: any) => it.device === device.head.device)?.total_bytes ?? Infinity) < 3 * device.total[state];
      view.caption = `The last ${count(Math.round(wide))} changes before ${bytes(oom.bytes)} were refused${holds ? "; what the verdict's line holds keeps its colour" : ""}. F shows this again, 0 shows all.`;
      return;
    }
    case "wasted": case "pinned":
      view.tab = view.chapters.length > 1 && job ? "ranks" : "map";
      view.setAxis(steps);
      fits();
      view.pick = line;
      view.caption = "Hatched: reserved and used by nothing. The address map below shows which blocks keep these segments.";
      return;
    case "churned": {
      view.setAxis(steps);
      fits();
      const mark = emptiedAt(view);
      if (mark) {
        view.pick = { kind: "mark", of: mark.kind, from: mark.from };
        view.put(device.at(mark.from));
      }
      view.caption = "Each mark in the row \u201cemptied\u201d releases the cache to the driver; PyTorch reserves the same memory again right after it.";
      return;
    }
    case "kept":
      view.pick = line;
      view.setAxis(steps);
      fits();
      view.caption = "What the verdict's line holds keeps its colour: long bands were waiting for Python's garbage collector.";
      return;
    case "uneven":
      view.tab = "ranks";
      view.pick = line;
      view.setAxis(steps);
      fits();
      view.caption = "This is the device that holds most; the views below have all of them on one scale.";
      return;
    case undefined: case "nothing_wrong": return;
    default:
      view.pick = line;
      if (line) view.caption = "What the verdict's line holds keeps its colour.";
  }
}

/** Of an axis of steps: all of them without what comes before and after; of another axis all of it. */
function stepsOnly(view: View, device: Device): [number, number] {
  if (view.axis !== "step") return view.busy;
  const n = view.trace.steps.length, first = device.chapter.stepAt(device.times[0]);
  return [Math.max(0, Math.floor(first)), n + 0.3];
}

/** Where what led to a state began: the last time that less than half was held, but not so far back that the end is a pixel. */
function beginning(device: Device, state: number): number {
  let from = state;
  while (from > 0 && device.total[from] * 2 > device.total[state]) from--;
  const far = device.changes[state] - device.changes[from];
  return device.changes[state] - Math.min(Math.max(far * 1.15, 30), 600);
}
