// The lanes and spans of the sequence drawing, by order of issue or by time.

import type { Collective, Trace } from "./model";
import * as words from "./words";

export interface Span {
  start: number;
  end: number;
  /** Its row in the lane; overlapping spans are in different rows. */
  row: number;
  /** Index of the collective; -1 for spans that only show a place (a phase, a module). */
  event: number;
  name: string;
  colour: string;
  /** A wait, in the lane of a thread. */
  faint?: boolean;
  /** Set on every other of neighbouring place spans. */
  shade?: boolean;
}

export interface Lane {
  name: string;
  spans: Span[];
  rows: number;
  /** Length of its longest span. */
  longest: number;
}

/** A long time in which nothing is issued, waited for or in flight, drawn narrow. */
export interface Fold {
  /** Real time, ns. */
  from: number;
  to: number;
  /** Its width in the drawing, ns. */
  kept: number;
}

const MOST_ROWS = 6;
const LONG_IDLE = 1 / 8; // of the whole time
const KEPT = 1 / 16; // of the rest

/** One slot per collective, one lane per group; phases and modules above them. */
export function lanesByOrder(trace: Trace): Lane[] {
  const { events } = trace;
  const parts = new Map<string | null, string>();
  const partOf = ({ site }: Collective) => {
    let found = parts.get(site);
    if (found === undefined) parts.set(site, (found = part(site)));
    return found;
  };
  const lanes = [runs("Pass", events, (event) => words.phase(event.phase)), runs("Module", events, partOf)];
  if (trace.steps > 1) lanes.unshift(runs("Step", events, (event) => (trace.isSetup(event) ? "setup" : `step ${event.step}`)));
  for (const [label, indices] of byGroup(trace)) {
    lanes.push(laned(label, indices.map((index) => ({ start: index, end: index + 1, row: 0, event: index, name: events[index]!.op, colour: label }))));
  }
  return lanes;
}

/** One lane per thread with its issues and waits; one per group with the collectives in flight. */
export function lanesByTime(trace: Trace): Lane[] {
  const timed = trace.events.filter((event) => event.returned > 0);
  const lanes: Lane[] = [];
  for (const thread of [...new Set(timed.map((event) => event.thread))].sort((a, b) => a - b)) {
    const spans: Span[] = [];
    for (const event of timed) {
      if (event.thread !== thread) continue;
      const label = trace.groupOf(event).label;
      spans.push({ start: event.started, end: event.returned, row: 0, event: event.index, name: event.op, colour: label });
      if (event.waitEnded) spans.push({ start: event.waitBegan, end: event.waitEnded, row: 0, event: event.index, name: `wait for ${event.op}`, colour: label, faint: true });
    }
    lanes.push(laned(thread === 0 ? "main thread" : `thread ${thread}`, spans));
  }
  for (const [label, indices] of byGroup(trace)) {
    const spans = indices.map((index) => trace.events[index]!).filter((event) => event.returned > 0).map((event): Span => ({
      start: event.started, end: Math.max(event.returned, event.waitEnded), row: 0, event: event.index, name: event.op, colour: label,
    }));
    if (spans.length) lanes.push(laned(`${label}, in flight`, spans));
  }
  return lanes;
}

/** The idle times that would take much of the drawing. */
export function idleTimes(lanes: readonly Lane[]): Fold[] {
  const spans = lanes.flatMap((lane) => lane.spans).sort((a, b) => a.start - b.start);
  const found: Fold[] = [];
  let [until, idle] = [spans[0]?.start ?? 0, 0];
  const whole = spans.reduce((last, span) => Math.max(last, span.end), until) - until;
  for (const { start, end } of spans) {
    if (start - until > LONG_IDLE * whole) {
      found.push({ from: until, to: start, kept: 0 });
      idle += start - until;
    }
    until = Math.max(until, end);
  }
  return found.map((fold) => ({ ...fold, kept: Math.min(fold.to - fold.from, KEPT * (whole - idle)) }));
}

/** The place of a time in the drawing. */
export function folded(time: number, folds: readonly Fold[]): number {
  let left = 0;
  for (const { from, to, kept } of folds) {
    if (time <= from) break;
    if (time < to) return from - left + ((time - from) * kept) / (to - from);
    left += to - from - kept;
  }
  return time - left;
}

/** The lanes as drawn. */
export function foldLanes(lanes: readonly Lane[], folds: readonly Fold[]): Lane[] {
  return lanes.map((lane) => {
    const spans = lane.spans.map((span) => ({ ...span, start: folded(span.start, folds), end: folded(span.end, folds) }));
    return { ...lane, spans, longest: spans.reduce((most, span) => Math.max(most, span.end - span.start), 0) };
  });
}

/** The collectives in flight at the same time, in order; only their number if there are more than `most`. */
export function overlapping(trace: Trace, event: Collective, most: number): { found: Collective[]; all: number } {
  const found: Collective[] = [];
  let all = 0;
  if (!event.returned) return { found, all };
  const end = Math.max(event.returned, event.waitEnded);
  for (const other of trace.events) {
    if (other === event || !other.returned) continue;
    if (other.started < end && Math.max(other.returned, other.waitEnded) > event.started) {
      all++;
      if (found.length < most) found.push(other);
    }
  }
  return { found, all };
}

function byGroup(trace: Trace): [string, number[]][] {
  const found = new Map<string, number[]>();
  for (const event of trace.events) {
    const label = trace.groupOf(event).label;
    const indices = found.get(label);
    if (indices) indices.push(event.index);
    else found.set(label, [event.index]);
  }
  return [...found].sort((a, b) => b[1].length - a[1].length).slice(0, 24);
}

/** Place spans in rows so that none overlap within a row, as far as space permits. */
function laned(name: string, spans: Span[]): Lane {
  spans.sort((a, b) => a.start - b.start || b.end - a.end);
  const ends: number[] = [];
  let longest = 0;
  for (const span of spans) {
    let row = ends.findIndex((end) => end <= span.start);
    if (row < 0) row = ends.length < MOST_ROWS ? ends.push(0) - 1 : MOST_ROWS - 1;
    ends[row] = Math.max(ends[row]!, span.end);
    span.row = row;
    longest = Math.max(longest, span.end - span.start);
  }
  return { name, spans, rows: Math.max(1, ends.length), longest };
}

function runs(name: string, events: readonly Collective[], of: (event: Collective) => string): Lane {
  const spans: Span[] = [];
  for (const event of events) {
    const said = of(event);
    const last = spans.at(-1);
    if (last && last.name === said) last.end = event.index + 1;
    else spans.push({ start: event.index, end: event.index + 1, row: 0, event: -1, name: said, colour: "", shade: spans.length % 2 === 0 });
  }
  return { name, spans, rows: 1, longest: spans.reduce((most, span) => Math.max(most, span.end - span.start), 0) };
}

/** The part of the model that contains a module: its path up to the first number, without the root. */
function part(site: string | null): string {
  if (site === null) return "outside all modules";
  const parts = site.split(".");
  const number = parts.findIndex((each) => /^\d+$/.test(each));
  if (number > 0) return parts.slice(1, number + 1).join(".");
  return parts[1] ?? parts[0]!;
}
