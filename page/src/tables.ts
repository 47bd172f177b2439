// Tables that sort and search, and the sections of the report.
import { curve } from "./curve";
import type { Cell, Chart, Fact, Section, Table, Text } from "./data";
import { copied, h, prose, shortFile, shortSite } from "./dom";
import { cell, count } from "./format";
import type { View } from "./view";

export interface Grid {
  name: string; caption: string; columns: [string, string][]; rows: Cell[][]; leftOut?: string | null;
  swatch?: (row: number) => string | null; onRow?: (row: number) => void; isPicked?: (row: number) => boolean;
}

const isNumber = (value: Cell) => value !== null && typeof value === "object" && value.c === undefined;

/** A table; a click on a heading sorts it. Each cell keeps its value, not only its words. */
export function grid(table: Grid, pattern: RegExp | null): HTMLElement {
  const order = table.rows.map((_, i) => i);
  let sorted = -1, sign = 1;
  const body = h("tbody");
  const numeric = table.columns.map((_, column) => table.rows.some((row) => isNumber(row[column])));
  const fill = () => body.replaceChildren(...order.map((index) => {
    const row = table.rows[index], words = row.map((value) => cell(value)[0]);
    const isLit = pattern ? words.some((word) => pattern.test(word)) : false;
    const isPicked = table.isPicked?.(index) ?? false, line = h("tr", { class: [pattern ? (isLit ? "lit" : "dim") : "", isPicked ? "picked" : ""].filter(Boolean).join(" ") || null });
    row.forEach((value, column) => {
      const [text, raw] = cell(value), tint = column === 0 ? table.swatch?.(index) : null, isFile = table.columns[column][0] === "trace";
      const shown = isFile ? shortFile(text) : shortSite(text);
      const element = h("td", { class: numeric[column] ? "number" : isFile ? "file" : text.length < 24 ? "short" : null, "data-value": raw, title: !numeric[column] && shown !== text ? text : null });
      const swatch = tint ? h("span", { class: "swatch" }) : "";
      if (swatch && tint) swatch.style.background = tint;
      if (table.onRow && column === 0) element.append(h("button", { type: "button", class: "plain", "aria-pressed": table.isPicked ? isPicked : null, onclick: () => table.onRow!(index) }, swatch, shown));
      else if (typeof value === "object" && value?.c !== undefined) element.append(command(value.c));
      else element.append(swatch, shown);
      line.append(element);
    });
    return line;
  }));
  const heads = table.columns.map(([name, title], column) => {
    const head = h("th", { scope: "col", class: numeric[column] ? "number" : null, "data-column": name }, h("button", {
      type: "button", class: "plain", onclick: () => {
        sign = sorted === column ? -sign : numeric[column] ? -1 : 1;
        sorted = column;
        const value = (index: number) => cell(table.rows[index][column])[1];
        order.sort((a, b) => { const [x, y] = [value(a), value(b)]; return x === y ? a - b : x === null ? 1 : y === null ? -1 : (x < y ? -1 : 1) * sign; });
        heads.forEach((it, i) => (i === column ? it.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending") : it.removeAttribute("aria-sort")));
        fill();
      },
    }, title || name));
    return head;
  });
  fill();
  const element = h("table", { "data-table": table.name }, h("caption", {}, table.caption), h("thead", {}, h("tr", {}, ...heads)), body);
  return h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": table.caption }, element, table.leftOut ? h("p", { class: "note" }, table.leftOut) : null);
}

/** A command, with a button that copies it. */
export function command(text: string): HTMLElement {
  const button = h("button", {
    type: "button", class: "copy", "aria-label": "Copy: " + text, onclick: () => {
      copied(text);
      button.textContent = "Copied";
      setTimeout(() => (button.textContent = "Copy"), 1500);
    },
  }, "Copy");
  return h("span", { class: "command" }, h("code", {}, text), button);
}

/** A section of the report. */
export function section(section: Section, pattern: RegExp | null): HTMLElement {
  const facts = section.items.filter((item): item is Fact => "fact" in item);
  const list = facts.length ? h("dl", {}, ...facts.flatMap((fact) => {
    const [text, raw] = cell(fact.value), isCommand = typeof fact.value === "object" && fact.value?.c !== undefined;
    return [h("dt", {}, fact.label), h("dd", { "data-fact": fact.fact, "data-value": raw, class: pattern?.test(text) ? "lit" : null }, ...(isCommand ? [command(text)] : prose(text)), fact.remark ? h("span", { class: "remark" }, fact.remark) : null)];
  })) : null;
  const rest = section.items.filter((item): item is Table | Chart | Text => !("fact" in item)).map((item) => {
    if ("chart" in item) return curve(item);
    if ("table" in item) {
      const table = item as Table;
      return grid({ name: table.table, caption: section.title, columns: table.columns, rows: table.rows, leftOut: table.left_out }, pattern);
    }
    return item.mood === "command" ? h("p", {}, command(item.text)) : h("p", { class: item.mood + (pattern?.test(item.text) ? " lit" : "") }, ...prose(item.text));
  });
  return h("section", { "data-section": section.name }, h("h3", {}, section.title), list, ...rest);
}

/** All sections of a trace, those of the summary, and the marks. */
export class Tables {
  readonly element = h("div");
  private key = "";
  constructor(private view: View) {}
  update() {
    const { view } = this, key = view.chapter + "\n" + view.words;
    if (key === this.key) return;
    this.key = key;
    const { report } = view.trace.head, pattern = view.words;
    this.element.replaceChildren(...this.summary().map((it) => section(it, pattern)), ...report.sections.map((it) => section(it, pattern)), ...this.marks().map((it) => section(it, pattern)));
  }
  private summary(): Section[] {
    const process = this.view.data.head.summary.processes[this.view.chapter];
    if (!process) return [];
    const devices: Cell[][] = [], owners: Cell[][] = [];
    const b = (value: number | null | undefined): Cell => (value === null || value === undefined ? null : { b: value });
    for (const device of process.devices) {
      const name = `cuda:${device.device}`, torch = device.torch;
      devices.push([name, device.name, b(device.total_bytes), b(device.driver.peak_bytes), b(device.driver.live_bytes), b(torch?.peak_allocated_bytes), b(torch?.peak_reserved_bytes), b(torch?.peak_requested_bytes), { n: device.driver.allocs }, { n: device.driver.frees }, { n: device.driver.failed }]);
      for (const owner of device.owners) owners.push([name, owner.owner, b(owner.bytes_at_peak), b(owner.peak_bytes), b(owner.live_bytes)]);
    }
    const columns: [string, string][] = [["device", "device"], ["name", "name"], ["total_bytes", "memory"], ["driver.peak_bytes", "peak"], ["driver.live_bytes", "live at end"], ["torch.peak_allocated_bytes", "torch allocated"], ["torch.peak_reserved_bytes", "torch reserved"], ["torch.peak_requested_bytes", "torch requested"], ["driver.allocs", "allocated"], ["driver.frees", "freed"], ["driver.failed", "refused"]];
    const title = "Figures of each device (gputrace summary)";
    const counts: Section = { name: "summary", title, items: [
      { fact: "events", label: "events", value: { n: process.events }, remark: "" }, { fact: "lost_events", label: "lost events", value: { n: process.lost_events }, remark: "" },
      ...[["peak", "pinned host memory, peak"], ["live", "live at end"], ["blocks_peak", "in PyTorch's blocks, peak"], ["blocks_live", "in PyTorch's blocks at end"]].flatMap(([of, label]): Fact[] => {
        const found = process.host.peak_bytes ? process.host[of + "_bytes"] : undefined;
        return found === undefined ? [] : [{ fact: `host.${of}_bytes`, label, value: b(found), remark: "" }];
      }),
      { table: "summary_devices", columns, rows: devices, left_out: null } as Table] };
    return [counts, { name: "summary_owners", title: "Owners of each device (gputrace summary)", items: [{ table: "summary_owners", columns: [["device", "device"], ["owner", "owner"], ["bytes_at_peak", "at peak"], ["peak_bytes", "own peak"], ["live_bytes", "live at end"]], rows: owners, left_out: null } as Table] }];
  }
  private marks(): Section[] {
    const most = 300;
    return [...this.view.trace.marks].filter(([, { list }]) => list.length).map(([kind, { list, n }]) => ({
      name: "marks_" + kind.replaceAll(" ", "_"), title: `On the time axis: ${kind}`, items: [{
        table: "marks", columns: [["text", "what"], ["time_ns", "when"], ["duration_ns", "for"], ["bytes", kind === "nccl" ? "count" : "bytes"]] as [string, string][],
        rows: list.slice(0, most).map((mark): Cell[] => [mark.text, { t: mark.from }, mark.to === null ? "did not end" : { t: mark.to - mark.from }, kind === "nccl" ? { n: mark.bytes } : mark.bytes ? { b: mark.bytes } : null]),
        left_out: n > most ? `${count(n - Math.min(most, list.length))} more; on the axis are the ${count(list.length)} longest of ${count(n)}` : null,
      } as Table],
    }));
  }
}
