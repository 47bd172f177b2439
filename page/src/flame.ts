// A flame graph: what was held, as a tree of owners and lines.
import type { Chapter } from "./model";

export interface Node { name: string; bytes: number; before: number; children: Map<string, Node>; holders: number[]; group: number }

const node = (name: string, group: number): Node => ({ name, bytes: 0, before: 0, children: new Map(), holders: [], group });

/** The tree of what is held now, and before where differences are wanted. Of a difference, both sides count. */
export function tree(chapter: Chapter, now: Float64Array, before: Float64Array | null, groupOf: ArrayLike<number>, isInverted: boolean): Node {
  const root = node("all", -1);
  for (let index = 0; index < chapter.holders.length; index++) {
    const bytes = now[index], earlier = before ? before[index] : 0;
    if (bytes <= 0 && earlier <= 0) continue;
    const holder = chapter.holders[index], lines = chapter.stackOf(holder);
    if (isInverted) lines.reverse();
    let at = root;
    for (const name of ["", holder.owner, ...lines]) {
      if (name !== "" || at !== root) {
        let child = at.children.get(name);
        if (!child) at.children.set(name, (child = node(name, groupOf[index])));
        // What several groups have a part in has no colour of one.
        if (child.group !== groupOf[index]) child.group = -1;
        at = child;
      }
      at.bytes += bytes;
      at.before += earlier;
      at.holders.push(index);
    }
  }
  return root;
}

/** How wide a node is: of a difference, what changed in it at least. */
export function width(node: Node, isDifference: boolean): number {
  if (!isDifference) return node.bytes;
  if (!node.children.size) return Math.abs(node.bytes - node.before);
  let sum = 0;
  for (const child of node.children.values()) sum += width(child, true);
  return sum;
}

export interface Box { node: Node; depth: number; from: number; to: number }

/** Boxes from 0 to 1, the widest child first; those below `least` are left out, and counted. */
export function boxes(root: Node, isDifference: boolean, least: number): { list: Box[]; depth: number; left: number } {
  const list: Box[] = [], whole = width(root, isDifference) || 1;
  let depth = 0, left = 0;
  const walk = (node: Node, level: number, from: number, share: number) => {
    if (share < least) { left++; return; }
    list.push({ node, depth: level, from, to: from + share });
    depth = Math.max(depth, level);
    const children = [...node.children.values()].map((child) => [child, width(child, isDifference)] as const).filter(([, wide]) => wide > 0);
    children.sort((a, b) => b[1] - a[1] || (a[0].name < b[0].name ? -1 : 1));
    for (const [child, wide] of children) { walk(child, level + 1, from, wide / whole); from += wide / whole; }
  };
  walk(root, 0, 0, 1);
  return { list, depth, left };
}

/** What is held through one function: `callers` goes from it outwards, `callees` inwards. Of a function that calls itself, from its
 * innermost call. */
export function sandwich(chapter: Chapter, now: Float64Array, before: Float64Array | null, groupOf: ArrayLike<number>, name: string): { callers: Node; callees: Node } {
  const [callers, callees] = [node(name, -1), node(name, -1)];
  for (let index = 0; index < chapter.holders.length; index++) {
    const bytes = now[index], earlier = before ? before[index] : 0;
    if (bytes <= 0 && earlier <= 0) continue;
    const holder = chapter.holders[index], lines = chapter.stackOf(holder), at = lines.lastIndexOf(name);
    if (at < 0) continue;
    for (const [root, path] of [[callers, [...lines.slice(0, at).reverse(), holder.owner]], [callees, lines.slice(at + 1)]] as const) {
      let place = root;
      for (let depth = -1; depth < path.length; depth++) {
        if (depth >= 0) {
          let child = place.children.get(path[depth]);
          if (!child) place.children.set(path[depth], (child = node(path[depth], groupOf[index])));
          if (child.group !== groupOf[index]) child.group = -1;
          place = child;
        }
        place.bytes += bytes;
        place.before += earlier;
        place.holders.push(index);
      }
    }
  }
  return { callers, callees };
}

/** What is held in the order in which it was handed out, from left to right: only what follows on one another through the same lines
 * is one box. */
export function ordered(chapter: Chapter, held: [holder: number, bytes: number][], groupOf: ArrayLike<number>): Box[] {
  const whole = held.reduce((sum, [, bytes]) => sum + bytes, 0) || 1, root = node("all", -1), list: Box[] = [{ node: root, depth: 0, from: 0, to: 1 }];
  let open: Box[] = [], at = 0;
  for (const [index, bytes] of held) {
    const holder = chapter.holders[index], path = [holder.owner, ...chapter.stackOf(holder)], to = at + bytes / whole;
    let same = 0;
    while (same < open.length && same < path.length && open[same].node.name === path[same]) same++;
    open = open.slice(0, same);
    path.forEach((name, depth) => {
      if (depth >= same) {
        const box = { node: node(name, groupOf[index]), depth: depth + 1, from: at, to };
        open.push(box);
        list.push(box);
      }
      const box = open[depth];
      box.to = to;
      box.node.bytes += bytes;
      if (box.node.group !== groupOf[index]) box.node.group = -1;
      if (box.node.holders.at(-1) !== index) box.node.holders.push(index);
    });
    root.bytes += bytes;
    root.holders.push(index);
    at = to;
  }
  return list;
}

/** Stacks with their bytes, one per line, as tools for flame graphs read them. */
export function folded(chapter: Chapter, now: Float64Array): string {
  const lines: string[] = [];
  now.forEach((bytes, index) => { if (bytes > 0) lines.push([chapter.holders[index].owner, ...chapter.stackOf(chapter.holders[index])].map((name) => name.replaceAll(";", ",")).join(";") + " " + bytes); });
  return lines.join("\n") + "\n";
}
