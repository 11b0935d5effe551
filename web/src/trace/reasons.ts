// Reasons for collectives: grouped by place, cause, owner and line.

import type { Collective, Trace } from "./model";
import { Tally } from "./tree";
import { count, formatRanks, number } from "../shared/words";
import * as words from "./words";

export const BY = {
  reason: "reason",
  source: "line of code",
  owner: "owner of the parameters",
  cause: "redistribution",
  size: "size",
} as const;

export type By = keyof typeof BY;

export interface Reason {
  key: string;
  sentence: string;
  tally: Tally;
  events: number[];
}

/** Costliest first. */
export function reasons(trace: Trace, events: readonly number[], by: By): Reason[] {
  const found = new Map<string, Reason>();
  const keys = new Keys();
  for (const index of events) {
    const event = trace.events[index]!;
    const key = keys.of(trace, event, by);
    let reason = found.get(key);
    if (!reason) found.set(key, (reason = { key, sentence: "", tally: new Tally(), events: [] }));
    reason.events.push(index);
    reason.tally.add(event.count, event.wireBytes * event.count, trace.timeOf(event));
  }
  const ordered = [...found.values()].sort((a, b) => b.tally.bytes - a.tally.bytes || b.tally.calls - a.tally.calls);
  for (const reason of ordered) reason.sentence = sentence(trace, reason, by);
  return ordered;
}

/** The grouping key, computed once for each kind of collective. */
class Keys {
  private numbers = new Map<unknown, number>();
  private known = new Map<number, string>();

  of(trace: Trace, event: Collective, by: By): string {
    if (by === "size") return this.make(trace, event, by);
    let key = this.known.get(event.kind);
    if (key === undefined) this.known.set(event.kind, (key = this.make(trace, event, by)));
    return key;
  }

  private make(trace: Trace, event: Collective, by: By): string {
    if (by === "source") return words.sourceWords(event);
    if (by === "owner") return event.owner ? `${event.owner.library} ${event.owner.name}` : "";
    if (by === "cause") return event.cause ? words.causeWords(event.cause) : "";
    if (by === "size") return `${event.op}\n${event.wireBytes}\n${event.dtype}\n${trace.groupOf(event).label}`;
    const owner = event.owner ? `${event.owner.library} ${words.pattern(event.owner.name)}` : "";
    const site = event.site === null ? "" : words.pattern(event.site);
    return [event.op, event.phase, site, owner, this.number(event.cause), this.number(event.source), event.through, trace.groupOf(event).label].join("\n");
  }

  private number(value: unknown): number {
    let found = this.numbers.get(value);
    if (found === undefined) this.numbers.set(value, (found = this.numbers.size));
    return found;
  }
}

function sentence(trace: Trace, reason: Reason, by: By): string {
  const events = reason.events.map((index) => trace.events[index]!);
  const first = events[0]!;
  if (by === "reason") return whole(trace, events, reason.tally.calls);
  const ops = new Map<string, number>();
  for (const event of events) {
    const name = words.opOn(trace, event.op, trace.groupOf(event).label);
    ops.set(name, (ops.get(name) ?? 0) + event.count);
  }
  const said = [...ops].sort((a, b) => b[1] - a[1]).slice(0, 3).map(([name, many]) => `${number(many)} ${name}`).join(", ") + (ops.size > 3 ? ", ..." : "");
  if (by === "source") return `${words.sourceWords(first) || "unknown line"}: ${said}`;
  if (by === "owner") return `${first.owner ? `${first.owner.library} ${first.owner.name}` : "no owner"}: ${said}`;
  if (by === "cause") return `${first.cause ? words.causeWords(first.cause) : "no redistribution"}: ${said}`;
  return `${said}${first.dtype ? `, ${first.dtype}` : ""}, ${sites(events)}`;
}

function whole(trace: Trace, events: Collective[], calls: number): string {
  const first = events[0]!;
  const group = trace.groupOf(first);
  const sizes = new Set(events.map((event) => trace.groupOf(event).ranks.length));
  const ranks = sizes.size === 1 && group.ranks.length ? ` (${count(group.ranks.length, "rank")})` : "";
  let text = `${number(calls)} ${words.opOn(trace, first.op, group.label)}${ranks}: ${sites(events)}`;
  if (first.owner) {
    const names = [...new Set(events.map((event) => event.owner!.name))];
    const own = events.every((event) => event.owner!.name === event.site);
    text += own ? `, for ${names.length === 1 ? "its" : "their"} own ${first.owner.library} parameters`
      : names.length === 1 ? `, ${words.ownerWords(first.owner, first.site)}`
      : first.owner.library === "DDP" ? `, for DDP's ${names.length} buckets` : `, for ${first.owner.library}'s parameters of ${words.fold(names.sort(words.natural))}`;
  }
  if (first.cause) text += `, ${words.causeWords(first.cause)}`;
  if (first.op === "send" || first.op === "recv") {
    const peers = events.map((event) => event.peer).filter((peer): peer is number => peer !== null);
    if (peers.length) text += `, ${first.op === "send" ? "to" : "from"} rank ${formatRanks(peers)}`;
  }
  const line = words.sourceWords(first);
  return line ? `${text}, at ${line}` : text;
}

function sites(events: Collective[]): string {
  const first = events[0]!;
  const paths = [...new Set(events.map((event) => event.site).filter((site): site is string => site !== null))].sort(words.natural);
  const one = new Set(paths.map(words.pattern)).size === 1 ? words.fold(paths) : paths.length > 1 ? `${count(paths.length, "module")}` : "";
  const phases = new Set(events.map((event) => event.phase));
  return phases.size === 1 ? words.place(first.phase, one || null) : `${[...phases].map((phase) => words.phase(phase)).join(" and ")}${one ? ` of ${one}` : ""}`;
}
