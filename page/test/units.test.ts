// What the pictures are made from, held against what is naive.
import assert from "node:assert/strict";
import { test } from "node:test";
import { Data, decoded } from "../src/data";
import { choose, shadeOf, shades, sweep } from "../src/blocks";
import { EVENT, eventAt, events } from "../src/events";
import { rows } from "../src/lanes";
import { markOf, Picked, readPick, written, type Pick } from "../src/pick";
import { labelled, shape, words } from "../src/curve";
import { shortFile } from "../src/dom";
import { boxes, folded, ordered, sandwich, tree, width } from "../src/flame";
import { address } from "../src/owners";
import { bytes, count, tickTime, ticks, time } from "../src/format";
import { Chapter, Compact, GROUPINGS, NO_STACK } from "../src/model";
import { Pyramid, upTo } from "../src/pyramid";
import { mixed, packed, Raster } from "../src/raster";
import { lit, search } from "../src/search";
import { envelope } from "../src/settings";

let seed = 7;
const random = (n: number) => (seed = (seed * 1103515245 + 12345) % 2147483648) % n;

/** As replay/page/src/columns.rs writes them. */
function encoded(values: number[]): number[] {
  const out: number[] = [];
  let before = 0;
  for (const value of values) {
    let raw = value - before >= 0 ? (value - before) * 2 : (before - value) * 2 - 1;
    before = value;
    while (raw >= 128) { out.push((raw % 128) | 128); raw = Math.floor(raw / 128); }
    out.push(raw);
  }
  return out;
}

test("columns are read as they were written, up to what a double holds", () => {
  const values = [1, 1, 300, 0, -1, 2 ** 50, -(2 ** 50), 2 ** 40, 2 ** 50];
  assert.deepEqual([...decoded(Uint8Array.from(encoded(values)), 0, values.length)], values);
  assert.deepEqual([...decoded(Uint8Array.from([2, 0, 0xd6, 4, 0xd7, 4]), 0, 4)], [1, 1, 300, 0]);
});

test("the best of every range is that of a naive search, ties by the other values and then by the first", () => {
  for (const n of [1, 2, 3, 7, 64, 65, 200]) {
    const values = Float64Array.from({ length: n }, () => random(9)), other = Float64Array.from({ length: n }, () => random(3));
    for (const sign of [1, -1] as const) {
      const pyramid = new Pyramid(values, sign, other);
      for (let from = 0; from < n; from++) {
        for (let to = from; to <= n; to++) {
          let best = -1;
          for (let i = from; i < to; i++) {
            if (best < 0 || sign * (values[i] - values[best] || other[i] - other[best]) > 0) best = i;
          }
          assert.equal(pyramid.best(from, to), best, `${sign} ${from}..${to} of ${values}`);
        }
      }
    }
  }
  assert.deepEqual([0, 1, 3, 9].map((wanted) => upTo([1, 1, 3, 5], wanted)), [0, 2, 3, 4]);
});

test("addresses lie without holes, in their order", () => {
  const compact = new Compact([[100, 110], [10, 20], [15, 30], [30, 35], [1000, 1001]]);
  assert.equal(compact.height, 25 + 10 + 1);
  assert.deepEqual([10, 34, 50, 100, 109, 1000].map((addr) => compact.of(addr)), [0, 24, 25, 25, 34, 35]);
  for (const at of [0, 24, 25, 34, 35]) assert.equal(compact.of(compact.address(at)), at);
});

/** A trace of three holders: x of 10 and 5 bytes, y of 7, unused. */
function chapter(): Chapter {
  const bytes: number[] = [], index: [number, number][] = [];
  const column = (values: number[]) => { const made = encoded(values); bytes.push(...made); index.push([values.length, made.length]); return index.length - 1; };
  const rectangles = (addr: number[], sizes: number[], from: number[], time: number[], what: number[]) => ({ addr: column(addr), bytes: column(sizes), spare: column(sizes.map(() => 0)), from: column(from), time: column(time), what: column(what), whole_at: [], n_tiled: 0, tile_bytes: 1 << 21, tile_columns: 512, tile_addr: column([]), tile_column: column([]), tile_blocks: column([]) });
  const head: any = {
    origin_ns: 0, duration_ns: 100, report: {}, owners: ["NCCL"], sites: ["x (a.py:1)", "y (b.py:2)"], roles: [["weights", ""]],
    layers: ["layer 0, forward (a.py:1)", "layer 1, forward (a.py:1)"],
    pools: [{ device: 0, id: "(1, 0)", what: "2 graphs", places: ["capture (/job/c.py:3)"] }],
    frames: [["main", "/job/a.py", 9], ["x", "/job/a.py", 1], ["y", "/job/b.py", 2]],
    stack_lengths: column([0, 2, 2]), stack_lines: column([0, 1, 0, 2]),
    holders: { level: column([1, 1, 2]), owner: column([0, 0, 0]), site: column([1, 2, 0]), stack: column([1, 2, 0]), stream: column([0, 1, 0]), role: column([1, 0, 0]), private: column([0, 0, 0]), layer: column([2, 1, 0]), kind: column([0, 0, 1]), kinds: ["blocks", "cache"], streams: ["0x5"], torch: "PyTorch" },
    devices: [{
      device: 0, name: "cuda:0", n_changes: 4, whole: null, stretch: 1, state_time: column([10, 20, 30, 40]), state_change: column([0, 1, 2, 3]), state_rows: column([2, 2, 2, 2]),
      row_holder: column([0, 2, 0, 2, 1, 2, 0, 2]), row_bytes: column([10, 90, 5, -5, 7, -7, -15, 15]), row_objects: column([1, 1, 1, 0, 1, 0, -2, 0]), base: "0x1000", n_unplaced: 0,
      blocks: rectangles([0, 10, 50], [10, 5, 7], [10, 20, 30], [31, 21, 0], [0, 0, 1]), grounds: rectangles([0, 200], [100, 50], [5, 5], [0, 0], [0, 4]),
    }],
    marks: [], settings: [], findings: [],
  };
  return new Chapter(head, new Data({ columns: index } as any, Uint8Array.from(bytes)), 0);
}

test("states add up, by any grouping", () => {
  const device = chapter().devices[0];
  assert.deepEqual([...device.total], [100, 100, 100, 100]);
  assert.deepEqual([...device.used], [10, 15, 22, 7]);
  assert.equal(device.peak, 2, "of equal totals that with most in use");
  assert.deepEqual([...device.held(2).bytes], [15, 7, 78]);
  for (const by of GROUPINGS) {
    const series = device.series(by);
    for (let state = 0; state < 4; state++) assert.equal(series.bytes.reduce((sum, group) => sum + group[state], 0), device.total[state], by);
    assert.equal(series.groups.at(-1)!.holders[0], 2, "what is unused lies on top");
  }
  assert.deepEqual([5, 10, 25, 99].map((at) => device.at(at)), [-1, 0, 1, 3]);
});

test("layers lie in their order, and a trace without any is not grouped by them", () => {
  const made = chapter();
  assert.deepEqual(made.devices[0].series("layer").groups.map(({ name, peak }) => [name, peak]), [["layer 0, forward (a.py:1)", 7], ["layer 1, forward (a.py:1)", 15], ["PyTorch, unused", 93]]);
  assert.ok(made.groupings.includes("layer"));
  made.head.layers = [];
  assert.ok(!made.groupings.includes("layer"));
});

test("segments know what is free in them, who pins them, and when nobody does", () => {
  const map = chapter().devices[0].rectangles();
  const at = map.segments(25).map(({ bytes, live, blocks, pool }) => [bytes, live, blocks, pool]);
  assert.deepEqual(at, [[100, 15, [0, 1], 0], [50, 0, [], 1]]);
  assert.equal(chapter().poolOf(1), "pool (1, 0): 2 graphs, captured at capture (/job/c.py:3)");
  assert.deepEqual(map.empty, [[5, 10], [5, 100]]);
  assert.deepEqual([map.find(3, 12), map.find(3, 45), map.find(12, 25), map.find(56, 90), map.find(57, 90)], [0, -1, 1, 2, -1]);
});

test("where blocks were left out, the instants that have all of theirs are known", () => {
  const device = chapter().devices[0], map = device.rectangles(), states = [0, 1, 2, 3];
  assert.deepEqual(states.map((state) => map.isWhole(state)), [true, true, true, true], "none is left out");
  // The highest, at 30, and the end, which is later than the last change.
  Object.assign(device.head.blocks, { n_tiled: 7, whole_at: [30, 100] });
  assert.deepEqual(states.map((state) => map.isWhole(state)), [false, false, true, true]);
  Object.assign(device.head.blocks, { whole_at: [25] });
  assert.deepEqual(states.map((state) => map.isWhole(state)), [false, false, false, false], "between two states is neither");
});

test("a flame graph has all bytes once, and a difference both sides", () => {
  const trace = chapter(), device = trace.devices[0], groups = device.series("site").groupOf;
  const root = tree(trace, device.held(2).bytes, null, groups, false);
  assert.equal(root.bytes, 100);
  assert.deepEqual([...root.children.get("PyTorch")!.children.get("main (a.py:9)")!.children.keys()], ["x (a.py:1)", "y (b.py:2)"]);
  const { list } = boxes(root, false, 0);
  for (const box of list) {
    const inside = list.filter((it) => it.depth === box.depth + 1 && it.from >= box.from - 1e-12 && it.to <= box.to + 1e-12);
    if (box.node.children.size) assert.ok(Math.abs(inside.reduce((sum, it) => sum + it.to - it.from, 0) - (box.to - box.from)) < 1e-9);
  }
  const change = tree(trace, device.held(3).bytes, device.held(0).bytes, groups, true);
  assert.equal(width(change, true), 10 + 7 + 3);
});

test("a search is a regular expression over all words of a holder, or says what is wrong", () => {
  const trace = chapter();
  assert.deepEqual(lit(trace, search("b\\.py")), [false, true, false]);
  assert.deepEqual(lit(trace, search("WEIGHTS")), [false, false, false]);
  assert.deepEqual(lit(trace, search("weights|used by nobody")), [true, false, true]);
  assert.equal(lit(trace, search("")), null);
  assert.ok(search("(").error && !search("(").pattern);
});

test("pixels: what is opaque hides, what is thin adds up, and nothing is drawn outside", () => {
  const raster = new Raster().begin(4, 3), [blue, white] = ["#0000ff", "#ffffff"].map(packed);
  assert.equal(blue, 0xffff0000);
  raster.fill(-5, -5, 2.4, 1.2, blue);
  raster.fill(3.2, 2, 99, 99, white);
  raster.fill(7, 0, 9, 1, white);
  raster.thin(0, 1.2, 0.5, 1.4, white, 1);
  raster.thin(1, 1, 2, 2, white, 1);
  raster.thin(5, 0, 6, 1, white, 1);
  raster.gathered();
  const shown = [...raster.pixels].map((pixel) => pixel.toString(16));
  assert.deepEqual(shown, ["ffff0000", "ffff0000", "0", "0", "33ffffff", "ffffffff", "0", "0", "0", "0", "0", "ffffffff"]);
  assert.deepEqual([mixed(0, white, 0.5), mixed(blue, white, 0), mixed(blue, white, 1), mixed(0xff000000, white, 0.5)].map((it) => it.toString(16)), ["80ffffff", "ffff0000", "ffffffff", "ff7f7f7f"]);
});

test("amounts are written as in a terminal", () => {
  assert.deepEqual([0, 512, 1023, 1024, 1048575, 1 << 20, 24041385984].map(bytes), ["0 B", "512 B", "1023 B", "1.00 KiB", "1.00 MiB", "1.00 MiB", "22.39 GiB"]);
  assert.deepEqual([5, 1500, 2.5e6, 6.045e9, 3.7e12].map(time), ["5 ns", "1.5 \u00b5s", "2.5 ms", "6.045 s", "1:01:40 h"]);
  assert.deepEqual([0, 999, 1000, 1234567].map(count), ["0", "999", "1,000", "1,234,567"]);
  assert.deepEqual(ticks(0, 10, 5, false), [0, 2, 4, 6, 8, 10]);
});

test("of points that fall on one place of the axis the highest is drawn", () => {
  const times = [0, 1, 2, 10, 11, 30], values = [5, 9, 1, 2, 3, 7];
  assert.deepEqual(envelope(times, values, (at) => Math.floor(at / 10)), [[0, 1, 3], [9, 3, 7]]);
  assert.deepEqual(envelope(times, values, (at) => at), [times, values]);
  assert.deepEqual(envelope(times, values, (at) => Math.floor(at / 10), 2, 5), [[0, 1], [1, 3]]);
  assert.deepEqual(envelope([], [], (at) => at), [[], []]);
});

test("names of files are one line: of long paths the end, of long names both ends", () => {
  const short = "job/rank0.gtr", long = "node-with-a-rather-long-name-0123.cluster.example.org.rank3.step-000012000.gtr";
  assert.equal(shortFile(short), short);
  assert.equal(shortFile(`/scratch/experiments/2026-11/${"x".repeat(20)}/job/rank0.gtr`), `\u2026/experiments/2026-11/${"x".repeat(20)}/job/rank0.gtr`);
  assert.equal(shortFile("a/" + long), "\u2026/node-with-a-rather-lon\u2026e.org.rank3.step-000012000.gtr");
  assert.ok(shortFile(long).length <= 56 && shortFile(long).endsWith("rank3.step-000012000.gtr"));
});

test("a curve goes through its points, its range around it, and a ceiling far above is not drawn", () => {
  const point = (at: number, room: number | null) => ({ at, low: at * 80, best: at * 100, high: at * 120, is_certain: at === 8, room });
  const chart = (room: number | null) => ({ chart: "Peak", variable: "batch", recorded: [[4, 400]] as [number, number][], ceiling: room === null ? null : "--limit 1 KiB", points: [8, 16, 32].map((at) => point(at, room)) });
  const corners = (text: string) => text.split(" ").map((it) => it.split(",").map(Number));
  const { area, line, ceiling, x, y } = shape(chart(2000)), near = (a: number, b: number) => assert.ok(Math.abs(a - b) < 0.06, `${a} ${b}`);
  corners(line).forEach(([left, high], i) => { near(left, x([8, 16, 32][i])); near(high, y([800, 1600, 3200][i])); });
  const wanted = [[8, 800], [16, 1280], [32, 2560], [32, 3840], [16, 1920], [8, 800]];
  corners(area).forEach(([left, high], i) => { near(left, x(wanted[i][0])); near(high, y(wanted[i][1])); });
  assert.equal(corners(area).length, wanted.length);
  corners(ceiling!).forEach(([, high]) => near(high, y(2000)));
  assert.equal(x(4), Math.min(...corners(ceiling!).map(([left]) => left)));
  assert.equal(shape(chart(1e6)).ceiling, null);
  assert.equal(shape(chart(null)).ceiling, null);
  assert.equal(words(chart(2000), 0), "batch=8: 800 B, certain; within the 1.95 KiB that --limit 1 KiB leaves");
  assert.equal(words(chart(2000), 2), "batch=32: 3.13 KiB, at least 2.50 KiB, at most 3.75 KiB; more than the 1.95 KiB that --limit 1 KiB leaves");
  assert.equal(words(chart(null), 1), "batch=16: 1.56 KiB, at least 1.25 KiB, at most 1.88 KiB");
});

test("a range of many times the guess leaves the picture, and values are written where they do not touch", () => {
  const points = [1, 2, 3].map((at) => ({ at, low: at, best: at * 10, high: at * 900, is_certain: false, room: null }));
  const { top, isCut, y } = shape({ chart: "", variable: "n", recorded: [], ceiling: null, points });
  assert.ok(isCut && top < 100 && y(2700) === y(top));
  const values = Array.from({ length: 60 }, (_, i) => i + 1), kept = labelled(values, (at) => at * 10);
  assert.ok(kept.includes(1) && kept.includes(60) && kept.length > 10);
  for (let i = 1; i < kept.length; i++) assert.ok((kept[i] - kept[i - 1]) * 10 >= 18);
});

test("an address is hexadecimal digits behind 0x, and nothing else is one", () => {
  assert.equal(address(" 0x7F5c40000200 "), "7f5c40000200");
  for (const other of ["", "7f5c40000200", "0x", "0x7f5c|x", "0x7f5c4000020000000", "x0x7f5c40000200"]) assert.equal(address(other), null, other);
});

test("bands are the largest blocks that are there, in the order of their births", () => {
  const n = 400, from = Float64Array.from({ length: n }, () => random(1000)).sort(), to = from.map((at) => at + random(300)), bytes = Float64Array.from({ length: n }, () => 1 + random(64));
  const blocks = { n, from, to, bytes, addr: bytes, spare: bytes, what: bytes };
  const isThere = (i: number, first: number, last: number) => from[i] <= last && to[i] >= first;
  for (const [first, last, least, most] of [[0, 2000, 0, 1000], [200, 400, 20, 1000], [200, 400, 0, 50], [500, 500, 0, 7]]) {
    const { ids, left } = choose(blocks, [first, last], least, most, new Uint8Array(65).fill(1), (i) => i % 3 > 0);
    const wanted = Array.from({ length: n }, (_, i) => i).filter((i) => i % 3 > 0 && isThere(i, first, last)), large = wanted.filter((i) => bytes[i] >= least);
    const kept = large.sort((a, b) => bytes[b] - bytes[a] || a - b).slice(0, most).sort((a, b) => a - b);
    assert.deepEqual([...ids], kept);
    assert.equal(left, wanted.length - kept.length, "what is left out is counted");
    const times = Float64Array.of(first, NaN, (first + last) / 2, last), columns: number[] = [];
    sweep(blocks, ids, times, (column, live, n) => {
      columns.push(column);
      assert.deepEqual([...live.subarray(0, n)], kept.filter((i) => from[i] <= times[column] && to[i] > times[column]), `at ${times[column]}`);
    });
    assert.deepEqual(columns, [0, 2, 3]);
  }
});

test("a colour has four shades, and a block always the same", () => {
  assert.deepEqual(shades("#000000"), ["#000000", "#292929", "#000000", "#4d4d4d"]);
  const seen = new Set(Array.from({ length: 100 }, (_, i) => shadeOf(i)));
  assert.deepEqual([...seen].sort(), [0, 1, 2, 3]);
});

test("a selection has its blocks and its holders, and is what its link says", () => {
  const device = chapter().devices[0], of = (pick: Exclude<Pick, { kind: "mark" }>) => new Picked(pick, device);
  const cases: [Exclude<Pick, { kind: "mark" }>, boolean[], number[]][] = [
    [{ kind: "block", from: 20, addr: 10 }, [true, false, false], [1]], [{ kind: "block", from: 21, addr: 10 }, [false, false, false], []],
    [{ kind: "group", by: "role", name: "weights" }, [true, false, false], [0, 1]], [{ kind: "line", text: "y (b.py:2)" }, [false, true, false], [2]],
    [{ kind: "size", bytes: 7 }, [false, true, false], [2]], [{ kind: "segment", from: 5, addr: 0 }, [true, true, false], [0, 1, 2]], [{ kind: "time", from: 15, to: 30, text: "step 1" }, [true, true, false], [1, 2]],
    [{ kind: "frames", names: ["PyTorch", "main (a.py:9)", "x (a.py:1)"], isInner: false }, [true, false, false], [0, 1]], [{ kind: "frames", names: ["PyTorch", "y (b.py:2)"], isInner: true }, [false, true, false], [2]],
  ];
  for (const [pick, holders, blocks] of cases) {
    const picked = of(pick);
    assert.deepEqual([picked.holders, picked.list, [0, 1, 2].filter((i) => picked.has(i))], [holders, blocks, blocks], written(pick));
    assert.deepEqual(readPick(written(pick)), pick);
  }
  assert.deepEqual([...of(cases[2][0]).bytes], [10, 15, 15, 0]);
  for (const wrong of [undefined, "", "{", "[]", '"block"', '{"kind":"block"}', '{"kind":"group","by":"x","name":"y"}', '{"kind":"frames","names":[]}', '{"kind":"size","bytes":"7"}']) assert.equal(readPick(wrong), null, String(wrong));
});

test("a mark that is selected is found again by its link, and has its stack or none", () => {
  const trace = chapter(), mark = (from: number, stack: number) => ({ kind: "cache emptied", from, to: from, text: "x (a.py:1)", device: 0, bytes: 7, stack }), list = [mark(20, 0), mark(50, 2)];
  trace.marks.set("cache emptied", { list, n: 2 });
  const pick: Pick = { kind: "mark", of: "cache emptied", from: 50 };
  assert.deepEqual(readPick(written(pick)), pick);
  assert.equal(markOf(pick, trace), list[1]);
  assert.deepEqual([markOf({ ...pick, from: 51 }, trace), markOf({ ...pick, of: "step" }, trace), markOf(null, trace)], [null, null, null]);
  assert.deepEqual(list.map((mark) => trace.stackOfMark(mark)), [[NO_STACK], ["main (a.py:9)", "x (a.py:1)"]]);
  for (const wrong of ['{"kind":"mark","of":"step","from":1}', '{"kind":"mark","of":"cache emptied"}']) assert.equal(readPick(wrong), null, wrong);
});

test("events are in their order: what is freed comes before what is handed out then", () => {
  const list = events(chapter().devices[0]), name = Object.fromEntries(Object.entries(EVENT).map(([name, kind]) => [kind, name]));
  assert.deepEqual(Array.from(list.time, (time, i) => [time, name[list.kind[i]], list.of[i]]), [[5, "bought", 0], [5, "bought", 1], [10, "born", 0], [20, "born", 1], [30, "born", 2], [40, "freed", 0], [40, "freed", 1]]);
  assert.deepEqual([eventAt(list, 4), eventAt(list, 40), eventAt(list, 40, 0), eventAt(list, 35)], [-1, 6, 5, 4]);
});

test("steps are equally wide, and nothing lies between them", () => {
  const trace = chapter(), mark = (from: number, to: number | null) => ({ kind: "step", from, to, text: "", device: -1, bytes: 0, stack: 0 });
  trace.marks.set("step", { list: [mark(20, 30), mark(50, 90)], n: 2 });
  assert.deepEqual([0, 10, 20, 25, 30, 40, 50, 70, 90, 95, 100].map((at) => trace.stepAt(at)), [-1, -0.5, 0, 0.5, 1, 1, 1, 1.5, 2, 2.5, 3]);
});

test("ranges that lie in one another have rows of their own", () => {
  const mark = (from: number, to: number | null) => ({ kind: "nvtx", from, to, text: "", device: -1, bytes: 0, stack: 0 });
  const shown = rows([mark(0, 100), mark(0, 10), mark(2, 5), mark(10, 20), mark(12, null), mark(100, 110)]).map((row) => row.map(({ from }) => from));
  assert.deepEqual(shown, [[0, 100], [0, 10], [2, 12]]);
});

test("callers and callees of a function have its bytes, and in the order of birth all are there once", () => {
  const trace = chapter(), device = trace.devices[0], groups = device.series("site").groupOf, now = device.held(2).bytes;
  const { callers, callees } = sandwich(trace, now, null, groups, "main (a.py:9)");
  assert.deepEqual([callers.bytes, callees.bytes, [...callers.children.keys()], [...callees.children].map(([name, { bytes }]) => [name, bytes])], [22, 22, ["PyTorch"], [["x (a.py:1)", 15], ["y (b.py:2)", 7]]]);
  assert.equal(sandwich(trace, now, null, groups, "y (b.py:2)").callers.children.get("main (a.py:9)")!.bytes, 7);
  const list = ordered(trace, [[0, 10], [0, 5], [1, 7], [0, 3]], groups), row = (depth: number) => list.filter((box) => box.depth === depth).map(({ node, from, to }) => [node.name, node.bytes, Math.round(from * 25), Math.round(to * 25)]);
  assert.deepEqual([row(0), row(1), row(2)], [[["all", 25, 0, 25]], [["PyTorch", 25, 0, 25]], [["main (a.py:9)", 25, 0, 25]]]);
  assert.deepEqual(row(3), [["x (a.py:1)", 15, 0, 15], ["y (b.py:2)", 7, 15, 22], ["x (a.py:1)", 3, 22, 25]]);
  assert.equal(folded(trace, now).split("\n")[0], "PyTorch;main (a.py:9);x (a.py:1) 15");
});

test("labels of an axis of time have one unit, the readout's where there is room", () => {
  assert.deepEqual([0, 5e8, 1e9].map((at) => tickTime(at, 5e8, 1e9)), ["0.0 s", "0.5 s", "1.0 s"]);
  assert.deepEqual([0, 5e8].map((at) => tickTime(at, 5e8, 5e8)), ["0 ms", "500 ms"]);
  assert.equal(tickTime(12_000_100_000, 1e5, 12_000_900_000), "12.0001 s");
  assert.equal(tickTime(12_000_100_000, 1e3, 12_000_900_000), "12000100 \u00b5s");
});

test("a map that is laid out in parts is the one that is laid out at once", () => {
  const [one, other] = [chapter(), chapter()].map((it) => it.devices[0].rectangles());
  assert.ok(!one.isLaidOut("change"));
  const shares = [...one.layOut("change")];
  assert.ok(one.isLaidOut("change") && !one.isLaidOut("time") && shares.length > 4);
  assert.deepEqual(shares, [...shares].sort((a, b) => a - b));
  assert.ok(shares.every((share) => share > 0 && share < 1));
  assert.deepEqual([one.lows, one.highs, one.empty, one.on("change")], [other.lows, other.highs, other.empty, other.on("change")]);
});
