// Phrases for the terms of a trace, the same as in commlens/traces/wording.py.

import { formatRanks, number } from "../shared/words";
import { type Cause, type Collective, type Frame, type Group, type Owner, PHASES, type Trace } from "./model";

/** A phase's name. */
export function phase(phase: number): string {
  return PHASES[phase] === "outside" ? "outside all modules" : PHASES[phase]!;
}

/** A phase's name within one module. */
export function phaseWithin(phase: number): string {
  return PHASES[phase] === "outside" ? "elsewhere" : PHASES[phase]!;
}

const MASK = /_?MaskPartial\((?:[^()]|\([^()]*\))*\)/g;

export function placements(text: string): string {
  const plain = text.replace(MASK, "MaskPartial").replaceAll("dim=", "").trim();
  return plain.startsWith("(") && plain.endsWith(",)") ? plain.slice(1, -2) : plain;
}

/** The dimensions of a mesh: `dp=2, tp=4` of `DeviceMesh((dp=2, tp=4), 'cpu', stride=(4, 1))`. */
export function mesh(text: string): string {
  return /^DeviceMesh\(\(([^()]*?),?\)/.exec(text)?.[1] ?? text;
}

export function shortOp(name: string): string {
  const parts = name.split(".");
  return parts.length > 1 && (parts[0] === "aten" || parts[0] === "prims") ? parts[1]! : name;
}

export function change(cause: Cause): string {
  return `${placements(cause.before)} → ${placements(cause.after)}`;
}

export function causeWords(cause: Cause): string {
  const needed = cause.op ? `, to run ${shortOp(cause.op)}` : "";
  return `DTensor ${change(cause)}${needed} (${cause.implicit ? "implicit" : "explicit"})`;
}

export function ownerWords(owner: Owner, site: string | null): string {
  if (owner.library === "DDP") return `for DDP's ${owner.name}`;
  if (owner.name === site) return `for its own ${owner.library} parameters`;
  const root = site?.split(".")[0];
  return `for ${owner.library}'s parameters of ${root && owner.name.startsWith(`${root}.`) ? owner.name.slice(root.length + 1) : owner.name}`;
}

export function why(event: Collective): string {
  return [event.owner ? ownerWords(event.owner, event.site) : "", event.cause ? causeWords(event.cause) : ""].filter(Boolean).join(", ");
}

export function fileName(path: string): string {
  return path.slice(path.lastIndexOf("/") + 1);
}

export function where(source: Frame | null): string {
  return source ? `${fileName(source.file)}:${source.line}` : "";
}

export function sourceWords(event: Collective): string {
  const line = where(event.source);
  if (!line) return event.through ?? "";
  return event.through ? `${line} (${event.through})` : line;
}

export function place(phase: number, site: string | null): string {
  const name = PHASES[phase]!;
  if (name === "outside") return site === null ? "outside all modules" : `outside, in ${site}`;
  if (name === "optimizer") return site === null ? "the optimizer step" : `the optimizer step, in ${site}`;
  if (name === "unclassified") return site === null ? "an unknown phase" : `an unknown phase of ${site}`;
  return site === null ? `${name}, module unknown` : `${name} of ${site}`;
}

export function onGroup(group: Group): string {
  return group.ranks.length ? `${group.label} [${formatRanks(group.ranks)}]` : group.label;
}

export function title(trace: Trace, event: Collective): string {
  const which = event.count === 1 ? `#${event.sequence}` : `${number(event.count)} ×`;
  const towards = event.peer === null ? "" : event.op === "send" ? ` to ${event.peer}` : event.op === "recv" ? ` from ${event.peer}` : "";
  return `${which} ${opOn(trace, event.op + towards, trace.groupOf(event).label)}`;
}

/** "all_reduce on tp"; the op alone if groups are unknown. */
export function opOn(trace: Trace, op: string, group: string): string {
  return trace.groupsKnown ? `${op} on ${group}` : op;
}

const DIGITS = /^\d+$/;

/** Replace each number in a path: paths that differ only in numbers have the same pattern. */
export function pattern(path: string): string {
  return path.split(".").map((part) => (DIGITS.test(part) ? "#" : part)).join(".");
}

/** Fold paths of one pattern: `layers.0` to `layers.31` become "layers.0-31". */
export function fold(paths: readonly string[]): string {
  const split = [...new Set(paths)].map((path) => path.split("."));
  const first = split[0];
  if (!first) return "";
  return first
    .map((part, column) => (split.every((parts) => parts[column] === part) ? part : formatRanks(split.map((parts) => Number(parts[column]))).replaceAll(",", "+")))
    .join(".");
}

const collator = new Intl.Collator("en", { numeric: true });

/** Sorts layers.2 before layers.10. */
export function natural(one: string, other: string): number {
  return collator.compare(one, other);
}

/** Match a path to the wanted one or below it, with or without the root's class name; `*` matches one part. */
export function pathMatches(path: string | null, wanted: string): boolean {
  if (path === null) return false;
  const parts = path.split(".");
  const asked = wanted.split(".");
  return [0, 1].some((start) => parts.length - start >= asked.length && asked.every((part, index) => partMatches(parts[start + index]!, part)));
}

function partMatches(part: string, wanted: string): boolean {
  if (wanted === "*" || part === wanted) return true;
  const range = /^(\d+)-(\d+)$/.exec(wanted); // "0-31", as in the name of a folded row
  if (range && DIGITS.test(part)) return Number(part) >= Number(range[1]) && Number(part) <= Number(range[2]);
  return wanted.includes("+") && wanted.split("+").some((each) => each !== wanted && partMatches(part, each));
}
