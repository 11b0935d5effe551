// A trace in memory: the content of a commlens.trace/1 file, with uniform objects and shared strings.

export const SCHEMA = "commlens.trace/1";
export const PHASES = ["forward", "backward", "recomputation", "optimizer", "outside", "unclassified"] as const;
export const UNCLASSIFIED = 5;

export interface Group {
  label: string;
  name: string;
  description: string;
  backend: string;
  ranks: number[];
}

export interface Frame {
  file: string;
  line: number;
  function: string;
}

export interface Owner {
  library: string;
  name: string;
  parameters: string[];
}

export interface Cause {
  op: string | null;
  before: string;
  after: string;
  implicit: boolean;
  mesh: string;
}

/** One collective, or `count` similar ones in the summarised part of a long trace. Times are in ns since the trace began. */
export interface Collective {
  index: number;
  /** Shared by all collectives that differ only in time and size. */
  kind: number;
  sequence: number;
  op: string;
  api: string;
  phase: number;
  group: number;
  site: string | null;
  call: number;
  /** Of a pipeline schedule, from 0. */
  microbatch: number | null;
  owner: Owner | null;
  cause: Cause | null;
  source: Frame | null;
  through: string | null;
  dtype: string;
  inputBytes: number;
  outputBytes: number;
  wireBytes: number;
  reduceOp: string | null;
  root: number | null;
  peer: number | null;
  tag: number;
  asynchronous: boolean | null;
  members: number;
  thread: number;
  step: number;
  lastStep: number;
  started: number;
  returned: number;
  waitBegan: number;
  waitEnded: number;
  /** The collective's own time, as the backend or a profiler measured it; 0 if unknown. */
  duration: number;
  /** The part of it in which other work ran. */
  overlapped: number | null;
  count: number;
}

export interface Parameter {
  name: string;
  placements: string;
  shape: number[] | null;
  dtype: string;
  localBytes: number | null;
  mesh: string;
}

export interface Module {
  path: string;
  type: string;
  calls: number;
  /** Of a shared module: other paths without a row of their own. */
  otherPaths: string[];
  parameters: Parameter[];
}

/** A tensor op in one place; `Trace.ops` has the order of runs. */
export interface OpKind {
  name: string;
  phase: number;
  site: string | null;
  shapes: string[];
  placements: string[];
  mesh: string;
  /** The lowest noise level that shows it. */
  noise: number;
}

export interface Coverage {
  dispatched: number;
  recorded: number;
  unclassified: number;
  blind: string[];
}

export class Trace {
  version = "";
  torch = "";
  script = "";
  rank = 0;
  worldSize = 1;
  preview = false;
  steps = 0;
  startedUnixNs = 0;
  /** When the first collective was issued, in the time of its events. */
  firstStarted = Infinity;
  /** Sequence number of the last collective before the first forward; 0: there was none; null: unknown. */
  setupUntil: number | null = null;
  groups: Group[] = [];
  modules: Module[] = [];
  events: Collective[] = [];
  opKinds: OpKind[] = [];
  /** For each op in order: its kind, and the lowest sequence number of a collective after it. */
  opKind: number[] = [];
  opBefore: number[] = [];
  coverage: Coverage = { dispatched: 0, recorded: 0, unclassified: 0, blind: [] };
  /** The estimated seconds of each collective, and the network's name. */
  estimate: { network: string; seconds: number[] } | null = null;
  timesKnown = false;
  /** Whether the time of some collective is known, beyond the moments at which the host issued it. */
  durationsKnown = false;
  bytesKnown = false;
  groupsKnown = false;

  /** Whether it belongs to the setup before the first forward, which no step repeats. */
  isSetup(event: Collective): boolean {
    return this.setupUntil !== null && event.sequence <= this.setupUntil;
  }

  groupOf(event: Collective): Group {
    return this.groups[event.group]!;
  }

  /** Nanoseconds of a collective, by the rules of commlens/traces/times.py, or the estimate; 0 if unknown. */
  timeOf(event: Collective): number {
    if (this.estimate) return (this.estimate.seconds[event.index] ?? 0) * 1e9 * event.count;
    if (this.preview || event.count > 1) return 0;
    if (event.duration) return event.duration;
    if (!CPU_BACKENDS.has(this.groupOf(event).backend) || !event.returned || (event.waitBegan && !event.waitEnded)) return 0;
    if (event.waitEnded) return Math.max(event.waitEnded, event.returned) - event.started;
    return event.asynchronous === false ? event.returned - event.started : 0;
  }

  /** The part of it that the rank waited; null if unknown. */
  waitedOf(event: Collective): number | null {
    const time = this.timeOf(event);
    if (!time || this.estimate) return null;
    const most = event.duration && event.overlapped !== null ? event.duration - event.overlapped : null;
    if (!CPU_BACKENDS.has(this.groupOf(event).backend) || (event.duration && !event.waitEnded)) return most;
    const blocked = event.returned - event.started + Math.max(0, event.waitEnded - Math.max(event.waitBegan, event.returned));
    return Math.min(most ?? time, blocked);
  }

  get calls(): number {
    return this.events.reduce((sum, event) => sum + event.count, 0);
  }

  get wireBytes(): number {
    return this.events.reduce((sum, event) => sum + event.wireBytes * event.count, 0);
  }
}

const CPU_BACKENDS = new Set(["gloo", "mpi"]);

const TRIVIAL = new Set([
  "aten.detach.default", "aten.t.default", "aten.view.default", "aten._to_copy.default", "aten.as_strided.default", "aten.transpose.int",
]);

/** Builds a trace piece by piece. Input is not trusted: a field of the wrong type gets its default. */
export class Builder {
  readonly trace = new Trace();
  private strings = new Map<string, string>();
  private objects = new Map<string, unknown>();
  private kinds = new Map<string, number>();
  private eventKinds = new Map<string, number>();
  private numbers = new Map<object, number>();

  meta(key: string, value: unknown): void {
    const trace = this.trace;
    if (key === "commlens_version") trace.version = text(value);
    else if (key === "torch_version") trace.torch = text(value);
    else if (key === "script") trace.script = text(value);
    else if (key === "rank") trace.rank = int(value);
    else if (key === "world_size") trace.worldSize = int(value, 1);
    else if (key === "preview") trace.preview = value === true;
    else if (key === "steps") trace.steps = int(value);
    else if (key === "setup_until") trace.setupUntil = optional(value);
    else if (key === "started_unix_ns") trace.startedUnixNs = int(value);
    else if (key === "coverage") {
      const found = record(value);
      trace.coverage = {
        dispatched: int(found["dispatched"]),
        recorded: int(found["recorded"]),
        unclassified: int(found["unclassified"]),
        blind: list(found["blind"]).map(text),
      };
    } else if (key === "groups") list(value).forEach((item) => this.group(item));
    else if (key === "modules") list(value).forEach((item) => this.module(item));
    else if (key === "events") list(value).forEach((item) => this.event(item));
    else if (key === "ops") list(value).forEach((item) => this.op(item));
  }

  group(value: unknown): void {
    const item = record(value);
    const [name, description, dimension] = [text(item["name"]), text(item["description"]), text(item["mesh_dim"])];
    const label = dimension || description || name;
    this.trace.groups.push({
      label: ["default_pg", "0", ""].includes(label) ? "default" : label,
      name,
      description,
      backend: text(item["backend"]),
      ranks: list(item["ranks"]).map((rank) => int(rank)),
    });
  }

  module(value: unknown): void {
    const item = record(value);
    this.trace.modules.push({
      path: this.shared(item["path"]),
      type: this.shared(item["type"]),
      calls: int(item["calls"]),
      otherPaths: list(item["other_paths"]).map((path) => this.shared(path)),
      parameters: list(item["parameters"]).map((each) => this.parameter(record(each))),
    });
  }

  private parameter(item: Record<string, unknown>): Parameter {
    return {
      name: this.shared(item["name"]),
      placements: this.shared(item["placements"]),
      shape: Array.isArray(item["shape"]) ? item["shape"].map((length) => int(length)) : null,
      dtype: this.shared(item["dtype"]),
      localBytes: optional(item["local_bytes"]),
      mesh: this.shared(item["mesh"]),
    };
  }

  event(value: unknown): void {
    const item = record(value);
    const { events, groups } = this.trace;
    const group = int(item["group"]);
    if (group < 0 || group >= groups.length) throw new Error(`event ${events.length} refers to group ${group} of ${groups.length}`);
    const step = int(item["step"]);
    const event: Collective = {
      index: events.length,
      kind: 0,
      sequence: int(item["sequence"]),
      op: this.shared(item["op"]),
      api: this.shared(item["api"]),
      phase: phaseOf(item["phase"]),
      group,
      site: this.path(item["site"]),
      call: int(item["call"]),
      microbatch: optional(item["microbatch"]),
      owner: this.once(item["owner"], ownerKey, ownerOf),
      cause: this.once(item["cause"], causeKey, causeOf),
      source: this.once(item["source"], frameKey, frameOf),
      through: this.path(item["through"]),
      dtype: this.shared(item["dtype"]),
      inputBytes: int(item["input_bytes"]),
      outputBytes: int(item["output_bytes"]),
      wireBytes: int(item["wire_bytes"]),
      reduceOp: this.path(item["reduce_op"]),
      root: optional(item["root"]),
      peer: optional(item["peer"]),
      tag: int(item["tag"]),
      asynchronous: typeof item["asynchronous"] === "boolean" ? item["asynchronous"] : null,
      members: int(item["members"]),
      thread: int(item["thread"]),
      step,
      lastStep: optional(item["last_step"]) ?? step,
      started: int(item["started_ns"]),
      returned: int(item["returned_ns"]),
      waitBegan: int(item["wait_began_ns"]),
      waitEnded: int(item["wait_ended_ns"]),
      duration: int(item["duration_ns"]),
      overlapped: optional(item["overlapped_ns"]),
      count: int(item["count"], 1),
    };
    const { op, api, phase, site, owner, cause, source, through, dtype } = event;
    const key = `${op}\n${api}\n${phase}\n${group}\n${site}\n${dtype}\n${through}\n${this.number(owner)} ${this.number(cause)} ${this.number(source)}`;
    let kind = this.eventKinds.get(key);
    if (kind === undefined) this.eventKinds.set(key, (kind = this.eventKinds.size));
    event.kind = kind;
    events.push(event);
  }

  op(value: unknown): void {
    const item = record(value);
    const name = this.shared(item["name"]);
    const placements = list(item["input_placements"]).map(text);
    const shapes = list(item["input_shapes"]).map((shape) => `[${list(shape).join(", ")}]`);
    const site = this.path(item["site"]);
    const mesh = text(item["mesh"]);
    const phase = phaseOf(item["phase"]);
    const key = [name, phase, site, mesh, placements.join(";"), shapes.join(";")].join("\n");
    let kind = this.kinds.get(key);
    if (kind === undefined) {
      const noise = TRIVIAL.has(name) ? 3 : placements.length || shapes.length && mesh ? 1 : 2;
      kind = this.trace.opKinds.push({ name, phase, site, shapes, placements, mesh, noise }) - 1;
      this.kinds.set(key, kind);
    }
    this.trace.opKind.push(kind);
    this.trace.opBefore.push(int(item["before_sequence"]));
  }

  finish(): Trace {
    const trace = this.trace;
    for (const { started, returned } of trace.events) if (returned > 0) trace.firstStarted = Math.min(trace.firstStarted, started);
    trace.timesKnown = !trace.preview && trace.events.some((event) => event.returned > 0);
    trace.durationsKnown = trace.events.some((event) => trace.timeOf(event) > 0);
    trace.bytesKnown = trace.events.length === 0 || trace.events.some((event) => event.wireBytes > 0 || event.dtype !== "" || event.op.endsWith("barrier"));
    trace.groupsKnown = trace.events.length === 0 || trace.groups.some((group) => group.ranks.length > 0);
    return trace;
  }

  private shared(value: unknown): string {
    const found = text(value);
    const known = this.strings.get(found);
    if (known !== undefined) return known;
    this.strings.set(found, found);
    return found;
  }

  private path(value: unknown): string | null {
    return typeof value === "string" ? this.shared(value) : null;
  }

  private once<T>(value: unknown, keyOf: (item: Item) => string, make: (item: Item) => T): T | null {
    if (typeof value !== "object" || value === null) return null;
    const key = keyOf(value as Item);
    let found = this.objects.get(key);
    if (found === undefined) {
      found = make(value as Item);
      this.objects.set(key, found);
    }
    return found as T;
  }

  private number(value: object | null): number {
    if (value === null) return 0;
    let found = this.numbers.get(value);
    if (found === undefined) this.numbers.set(value, (found = this.numbers.size + 1));
    return found;
  }
}

type Item = Record<string, unknown>;

function ownerKey(owner: Item): string {
  return `o${owner["library"]}\n${owner["name"]}\n${list(owner["parameters"]).join("\n")}`;
}

function ownerOf(owner: Item): Owner {
  return { library: text(owner["library"]), name: text(owner["name"]), parameters: list(owner["parameters"]).map(text) };
}

function causeKey(cause: Item): string {
  return `c${cause["op"]}\n${cause["before"]}\n${cause["after"]}\n${cause["implicit"]}\n${cause["mesh"]}`;
}

function causeOf(cause: Item): Cause {
  return {
    op: typeof cause["op"] === "string" ? cause["op"] : null,
    before: text(cause["before"]),
    after: text(cause["after"]),
    implicit: cause["implicit"] === true,
    mesh: text(cause["mesh"]),
  };
}

function frameKey(frame: Item): string {
  return `f${frame["file"]}\n${frame["line"]}\n${frame["function"]}`;
}

function frameOf(frame: Item): Frame {
  return { file: text(frame["file"]), line: int(frame["line"]), function: text(frame["function"]) };
}

function phaseOf(value: unknown): number {
  const found = PHASES.indexOf(value as (typeof PHASES)[number]);
  return found < 0 ? UNCLASSIFIED : found;
}

export function record(value: unknown): Record<string, unknown> {
  return typeof value === "object" && value !== null && !Array.isArray(value) ? (value as Record<string, unknown>) : {};
}

export function list(value: unknown): unknown[] {
  return Array.isArray(value) ? value : [];
}

export function text(value: unknown): string {
  return typeof value === "string" ? value : "";
}

function int(value: unknown, otherwise = 0): number {
  return typeof value === "number" && Number.isFinite(value) ? value : otherwise;
}

function optional(value: unknown): number | null {
  return typeof value === "number" && Number.isFinite(value) ? value : null;
}
