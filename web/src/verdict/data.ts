// The page's data as Python writes it: src/commlens/reports/verdict_page/data.py explains every field.

import { number } from "../shared/words";

export type Role = "culprit" | "victim" | "awaited" | "involved" | "unknown" | "none";

export interface Finding {
  kind: string;
  why: string;
  root_cause: boolean;
  culprits: number[];
  victims: number[];
  confidence: string;
  summary: string;
  explanation: string;
  next_step: string;
  source: string | null;
  source_file: string | null;
  function: string | null;
  evidence: string[];
  would_raise_confidence: string | null;
}

export interface Verdict {
  schema: string;
  kind: string;
  why: string;
  culprits: number[];
  victims: number[];
  confidence: string;
  summary: string;
  explanation: string;
  next_step: string;
  findings: Finding[];
  missing_evidence: string[];
  looked_at: string;
  worlds: Worlds;
  cause?: Cause;
}

/** The worlds of a job: src/commlens/model/worlds.py. */
export interface Worlds {
  worlds: { name: string; first: number; size: number }[];
  outsiders: { number: number; group: string; member: number }[];
}

/** What was found, as data: the fields of a `diverged` cause. */
export interface Cause {
  ranks?: number[];
  tensors?: DivergedTensor[];
  differing?: number;
  history?: Compared[];
}

export interface DivergedTensor {
  kind: string;
  name: string;
  sides: { ranks: number[]; digest: string; norm?: number; mean?: number }[];
}

export interface Compared {
  step: number;
  differing: number;
}

export interface RankClass {
  ranks: string;
  count: number;
  role: Role;
  doing: string;
  each: string;
  place: string;
  detail: string;
}

export interface GraphNode {
  cls: number;
  title: string;
  lines: string[];
  root: boolean;
}

export interface GraphEdge {
  source: number;
  target: number;
  label: string;
  waiting: string;
  parted: boolean;
}

export interface LayoutRow {
  name: string;
  ranks: number[];
  fault: boolean;
}

export interface Layout {
  name: string;
  about: string;
  rows: LayoutRow[];
}

export interface Ops {
  start: number[];
  end: number[];
  channel: number[];
  number: number[];
  name: number[];
  asked: number[];
  place: number[];
  state: number[];
}

export interface Lane {
  rank: number;
  role: Role;
  ops: Ops;
}

export interface Arrivals {
  label: string;
  channel: number;
  ranks: number[];
  at: number[];
  absent: string;
}

export interface Timeline {
  zero_is: string;
  captured: number;
  captured_known: boolean;
  window: [number, number];
  channels: { label: string; ranks: string }[];
  texts: string[];
  lanes: Lane[];
  left_out: number;
  arrivals: Arrivals[];
  notes: string[];
}

export interface Cell {
  op: string;
  what?: string;
  place?: string;
  state?: "completed" | "in-flight" | "failed" | "unknown" | "absent" | "overwritten";
  differs?: boolean;
  late?: string;
}

export interface Table {
  name: string;
  about: string;
  columns: { ranks: string; role: Role }[];
  rows: { number: string; cells: Cell[]; fault: boolean; note: string }[];
  left_out: string;
}

export interface StackFrame {
  function: string;
  place: string;
  file: string;
  kind: string;
}

export interface StackClass {
  ranks: string;
  count: number;
  role: Role;
  thread: string;
  frames: StackFrame[];
  note: string;
}

export interface Ranks {
  texts: string[];
  rank: number[];
  role: Role[];
  cls: number[];
  host: number[];
  pid: number[];
  steps: number[];
  issued: number[];
  last: number[];
  end: number[];
  stack: number[];
  source: number[];
}

export interface VerdictPage {
  commlens: string;
  verdict: Verdict;
  text: string;
  restart: string;
  facts: [string, string][];
  ranks: Ranks;
  classes: RankClass[];
  graph: { nodes: GraphNode[]; edges: GraphEdge[] };
  layouts: Layout[];
  timeline: Timeline;
  tables: Table[];
  stacks: StackClass[];
  step: StepTable | null;
  source: SourceLines | null;
  others: OtherLine | null;
  hardware: HardwareTable | null;
}

export interface HardwareChange {
  node: string;
  ranks: string;
  at: string;
  since: string;
  what: string;
  mark: "explains" | "coincides" | "";
}

/** What changed in the hardware of the nodes. */
export interface HardwareTable {
  changes: HardwareChange[];
  left_out: string;
}

/** Where the communication time of a step goes. */
export interface StepTable {
  answer: string;
  headings: string[];
  rows: string[][];
  notes: string[];
  bars: RankBar[];
  rates: RateBar[];
}

/** What a kind of transfer reaches of its links' nominal rate, in a sentence. */
export interface RateBar {
  percent: number;
  text: string;
}

/** Where the time of a step goes on one rank, in percent of the step; the rest is its own work. */
export interface RankBar {
  rank: string;
  waits: number;
  sends: number;
  text: string;
}

/** The lines of source around the culprit's. */
export interface SourceLines {
  first: number;
  line: number;
  lines: string[];
}

/** In a mismatch: the line of the ranks that are not the culprits. */
export interface OtherLine {
  ranks: string;
  place: string;
  source: SourceLines | null;
}

/** The names of the roles on the page. */
export const ROLES: Record<Role, string> = {
  culprit: "culprit",
  awaited: "waited for",
  involved: "involved",
  victim: "victim",
  unknown: "no record",
  none: "not affected",
};

/** `1 victim`, `3 victims`, `2 not affected`. */
export function countRole(role: Role, ranks: number): string {
  const plural = ranks === 1 ? "" : role === "culprit" || role === "victim" ? "s" : "";
  return `${number(ranks)} ${ROLES[role]}${plural}`;
}

export const ROLE_ORDER: readonly Role[] = ["culprit", "awaited", "involved", "victim", "unknown", "none"];
