// Reads the page's trace or a dropped file line by line, and lets the browser update in between.

import { embeddedStream } from "./embedded";
import { convert } from "./comm_debug";
import { Builder, SCHEMA, type Trace, record, text } from "./model";

/** The first line of the page's data; the traces follow in their file format. */
export interface Head {
  kind: "trace" | "compare";
  /** The name of each trace. */
  names: string[];
  notes: string[];
  ranks?: { answer: string; differences: string[]; classes: string[] };
  comparison?: Comparison;
  estimates?: { network: string; seconds: number[] }[];
}

export interface Change {
  kind: string;
  sentence: string;
  op: string;
  phase: string | null;
  module: string | null;
  group: string;
}

export interface Comparison {
  answer: string;
  per_step?: boolean;
  changes: Change[];
  notes: string[];
}

export interface Loaded {
  head: Head;
  traces: Trace[];
}

export type Progress = (share: number) => void;

/** A file that is not a trace. The message is a sentence for the reader. */
export class NoTrace extends Error {}

/** The page's own traces; null in an empty viewer. */
export async function readEmbedded(progress: Progress): Promise<Loaded | null> {
  const found = embeddedStream();
  if (!found) return null;
  const lines = linesOf(found.stream, found.size, progress);
  const first = await lines.next();
  const head = JSON.parse(first.value ?? "null") as Head | null;
  if (!head) throw new NoTrace("This page contains no trace.");
  const traces: Trace[] = [];
  for (const _ of head.names) traces.push(await readLines(lines));
  head.estimates?.forEach((estimate, index) => {
    const trace = traces[index];
    if (trace) trace.estimate = estimate;
  });
  return { head, traces };
}

/** Read a dropped or chosen file: a trace, compressed or not, or CommDebugMode's JSON. Nothing is uploaded. */
export async function readFile(file: File, progress: Progress): Promise<Loaded> {
  const magic = new Uint8Array(await file.slice(0, 2).arrayBuffer());
  const packed = magic[0] === 0x1f && magic[1] === 0x8b;
  try {
    return alone(file.name, (await readByLines(contentOf(file, packed, progress))) ?? fromJson(await new Response(contentOf(file, packed, progress)).text()));
  } catch (error) {
    if (error instanceof NoTrace) throw new NoTrace(`${file.name} ${error.message}`);
    if (error instanceof RangeError) throw new NoTrace(`${file.name} is too large for this browser to read in one piece: use commlens view -o.`);
    throw new NoTrace(`${file.name} cannot be read: ${packed ? "its compressed content is cut off or damaged" : String(error)}.`);
  }
}

function contentOf(file: File, packed: boolean, progress: Progress): ReadableStream<Uint8Array<ArrayBuffer>> {
  let read = 0;
  const counted = new TransformStream<Uint8Array<ArrayBuffer>, Uint8Array<ArrayBuffer>>({
    transform(chunk, controller) {
      read += chunk.length;
      progress(read / file.size);
      controller.enqueue(chunk);
    },
  });
  const raw = (file.stream() as ReadableStream<Uint8Array<ArrayBuffer>>).pipeThrough(counted);
  return packed ? raw.pipeThrough(new DecompressionStream("gzip")) : raw;
}

/** Parse a line with one item, as commlens writes them. Return null for other layouts, which are read in one piece. */
async function readByLines(stream: ReadableStream<Uint8Array>): Promise<Trace | null> {
  const lines = linesOf(stream, 0, () => undefined);
  const start = [await lines.next(), await lines.next()];
  const [first, second] = start.map((line) => (line.done ? "" : line.value));
  try {
    if (first === "{" && second === ` "schema": "${SCHEMA}",`) return await readLines(lines, true);
  } catch (error) {
    if (!(error instanceof NoTrace)) throw error;
  }
  await lines.return(undefined);
  return null;
}

function alone(name: string, trace: Trace): Loaded {
  return { head: { kind: "trace", names: [name], notes: [] }, traces: [trace] };
}

function fromJson(content: string): Trace {
  let value: unknown;
  try {
    value = JSON.parse(content);
  } catch (error) {
    if (content.startsWith("COMMLENS")) throw new NoTrace("is a black box, not a trace: use commlens diagnose.");
    const start = content.trimStart()[0];
    throw new NoTrace(start === "{" || start === "[" ? "is not a whole trace: its JSON is cut off or damaged." : "is not a trace: it holds no JSON.");
  }
  const found = record(value);
  if (found["schema"] === undefined && typeof found["fqn"] === "string" && Array.isArray(found["children"])) return convert(found);
  if (found["schema"] !== SCHEMA) {
    const schema = found["schema"] === undefined ? "it is JSON without a schema" : `its schema is ${text(found["schema"]).slice(0, 80) || "no text"}`;
    throw new NoTrace(`is not a trace that can be read: ${schema}, where ${SCHEMA} or CommDebugMode's JSON is expected.`);
  }
  const builder = new Builder();
  try {
    const { groups, ...rest } = found;
    builder.meta("groups", groups);
    for (const [key, item] of Object.entries(rest)) builder.meta(key, item);
  } catch (error) {
    throw new NoTrace(`claims to be a trace but is damaged: ${error instanceof Error ? error.message : String(error)}.`);
  }
  return builder.finish();
}

/** Read one trace from lines as formats/trace_json.py writes them. */
async function readLines(lines: AsyncIterator<string>, begun = false): Promise<Trace> {
  const builder = new Builder();
  let adding: ((item: unknown) => void) | null = null;
  let ended = false;
  for (;;) {
    const next = await lines.next();
    if (next.done) break;
    const line = next.value;
    if (!begun) {
      begun = line === "{";
      continue;
    }
    if (line === "}") {
      ended = true;
      break;
    }
    try {
      if (adding) {
        if (line.startsWith(" ]")) adding = null;
        else adding(JSON.parse(withoutComma(line)));
        continue;
      }
      const open = /^ "(groups|modules|events|ops)": \[$/.exec(line);
      if (open) adding = addTo(builder, open[1]!);
      else for (const [key, value] of Object.entries(JSON.parse(`{${withoutComma(line)}}`) as object)) builder.meta(key, value);
    } catch (error) {
      const why = error instanceof SyntaxError ? "one of its lines is not JSON" : error instanceof Error ? error.message : String(error);
      throw new NoTrace(`claims to be a trace but is damaged: ${why}.`);
    }
  }
  if (!ended) throw new NoTrace("is not a whole trace: it is cut off, as if the program ended while writing it.");
  return builder.finish();
}

function addTo(builder: Builder, name: string): (item: unknown) => void {
  if (name === "groups") return (item) => builder.group(item);
  if (name === "modules") return (item) => builder.module(item);
  if (name === "events") return (item) => builder.event(item);
  return (item) => builder.op(item);
}

function withoutComma(line: string): string {
  return line.endsWith(",") ? line.slice(0, -1) : line;
}

const SLICE_MS = 14;

async function* linesOf(stream: ReadableStream<Uint8Array>, size: number, progress: Progress): AsyncGenerator<string, undefined> {
  const reader = stream.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  let read = 0;
  let since = performance.now();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (value) read += value.length;
      const parts = (rest + decoder.decode(value, { stream: !done })).split("\n");
      rest = done ? "" : parts.pop()!;
      for (const part of parts) {
        yield part;
        if (performance.now() - since > SLICE_MS) {
          progress(size ? Math.min(1, read / size) : 0);
          await breathe();
          since = performance.now();
        }
      }
      if (done) return undefined;
    }
  } finally {
    await reader.cancel().catch(() => undefined);
  }
}

/** Let the browser paint and respond. */
function breathe(): Promise<void> {
  return new Promise((resolve) => {
    const { port1, port2 } = new MessageChannel();
    port1.onmessage = () => {
      port1.close();
      resolve();
    };
    port2.postMessage(null);
  });
}
