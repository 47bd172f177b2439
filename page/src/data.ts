// The data of the page: base64 of gzip of a length, a text in JSON, and columns of numbers (replay/page/src/columns.rs).

export type Cell = null | string | { b?: number; d?: number; n?: number; t?: number; s?: number; c?: string };
export interface Table { table: string; columns: [string, string][]; rows: Cell[][]; left_out: string | null }
export interface Fact { fact: string; label: string; value: Cell; remark: string }
export interface Text { mood: "note" | "good" | "warning" | "bad" | "command"; text: string }
/** Bytes over the values of a variable: at least, the best guess, at most, and what there is room for. */
export interface Chart {
  chart: string; variable: string; recorded: [number, number][]; ceiling: string | null;
  points: { at: number; low: number; best: number; high: number; is_certain: boolean; room: number | null }[];
}
export type Item = Table | Chart | Fact | Text;
export interface Section { name: string; title: string; items: Item[] }
export interface Report {
  title: string; trace: string; pid: number | null; rank: number | null; command: string[];
  verdict: { kind: string; also: string[]; section: Section } | null; sections: Section[];
}
export interface RectangleColumns {
  addr: number; bytes: number; spare: number; from: number; time: number; what: number; whole_at: number[];
  n_tiled: number; tile_bytes: number; tile_columns: number; tile_addr: number; tile_column: number; tile_blocks: number;
}
export interface DeviceHead {
  device: number; name: string; n_changes: number; whole: [number, number] | null; stretch: number; state_time: number; state_change: number;
  state_rows: number; row_holder: number; row_bytes: number; row_objects: number; base: string;
  blocks: RectangleColumns; grounds: RectangleColumns; n_unplaced: number;
}
export interface MarksHead { kind: string; n: number; from: number; time: number; device: number; bytes: number; stack: number; text: number; texts: string[] }
export interface SettingsHead {
  device: number; stretch: number; doubt: string | null; time: number; allocated: number; reserved: number;
  tried: { options: string; peak_reserved_bytes: number; is_recorded: boolean; runs_out: boolean; reserved: number }[];
}
export interface ChapterHead {
  origin_ns: number; duration_ns: number; report: Report; owners: string[]; sites: string[]; roles: [string, string][];
  frames: [string, string, number][]; stack_lengths: number; stack_lines: number;
  /** PyTorch's private pools: a holder's `private` is one more than the index. */
  pools: { device: number; id: string; what: string; places: string[] }[];
  /** The model's layers in the order of its forward pass: a holder's `layer` is one more than the index. */
  layers: string[];
  holders: { layer: number; level: number; owner: number; site: number; stack: number; stream: number; role: number; private: number; kind: number; kinds: string[]; streams: string[]; torch: string };
  devices: DeviceHead[]; marks: MarksHead[]; settings: SettingsHead[];
  /** What is wrong with the job, where this trace shows it: when, and in words. */
  findings: [number, string][];
}
export interface Head { format: string; version: string; summary: any; job: Section[]; chapters: ChapterHead[]; columns: [number, number][] }

/** The head, and the columns, each decoded when it is first asked for. */
export class Data {
  private known = new Map<number, Float64Array>();
  private starts: number[] = [];
  constructor(readonly head: Head, private bytes: Uint8Array) {
    let at = 0;
    for (const [, length] of head.columns) { this.starts.push(at); at += length; }
  }
  column(id: number): Float64Array {
    let column = this.known.get(id);
    if (!column) {
      column = decoded(this.bytes, this.starts[id], this.head.columns[id][0]);
      this.known.set(id, column);
    }
    return column;
  }
}

/** Differences as varints, the sign in the lowest bit. */
export function decoded(bytes: Uint8Array, at: number, n: number): Float64Array {
  const values = new Float64Array(n);
  let before = 0;
  for (let i = 0; i < n; i++) {
    let byte = bytes[at++], raw = byte & 127, scale = 128;
    while (byte >= 128) {
      byte = bytes[at++];
      raw += (byte & 127) * scale;
      scale *= 128;
    }
    before += raw % 2 ? -(raw + 1) / 2 : raw / 2;
    values[i] = before;
  }
  return values;
}

export function opened(bytes: Uint8Array): Data {
  const length = new DataView(bytes.buffer, bytes.byteOffset).getUint32(0, true);
  const head = JSON.parse(new TextDecoder().decode(bytes.subarray(4, 4 + length)));
  return new Data(head, bytes.subarray(4 + length));
}

/** Bytes that are unpacked between two looks at the clock. */
const SLICE = 1 << 17;

/** What is in the page; `say` gets the share that is unpacked. */
export async function read(text: string, say: (share: number) => Promise<void>): Promise<Data> {
  const letters = atob(text), bytes = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i++) bytes[i] = letters.charCodeAt(i);
  let at = 0;
  const slices = new ReadableStream<Uint8Array<ArrayBuffer>>({
    async pull(controller) {
      await say(at / bytes.length);
      if (at < bytes.length) controller.enqueue(bytes.subarray(at, (at += SLICE))); else controller.close();
    },
  });
  return opened(new Uint8Array(await new Response(slices.pipeThrough(new DecompressionStream("gzip"))).arrayBuffer()));
}
