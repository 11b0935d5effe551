// The tree of modules with their communication, and its visible rows.

import { type Collective, PHASES, type Parameter, type Trace } from "./model";
import * as words from "./words";

const FOLD_FROM = 3; // from this many modules that differ only in a number, one row

/** A number of collectives, bytes on the wire, and nanoseconds. */
export class Tally {
  calls = 0;
  bytes = 0;
  ns = 0;

  add(calls: number, bytes: number, ns: number): void {
    this.calls += calls;
    this.bytes += bytes;
    this.ns += ns;
  }
}

export class Totals {
  readonly sum = new Tally();
  readonly byPhase = PHASES.map(() => new Tally());
  readonly byGroup = new Map<string, Tally>();

  add(event: Collective, group: string, ns: number): void {
    const bytes = event.wireBytes * event.count;
    this.sum.add(event.count, bytes, ns);
    this.byPhase[event.phase]!.add(event.count, bytes, ns);
    let tally = this.byGroup.get(group);
    if (!tally) this.byGroup.set(group, (tally = new Tally()));
    tally.add(event.count, bytes, ns);
  }
}

/** A module, or modules that differ only in a number: `layers.0-31.attention`. Figures are sums. */
export class ModuleRow {
  label = "";
  readonly members: string[] = [];
  readonly children: ModuleRow[] = [];
  parent: ModuleRow | null = null;
  own = new Totals();
  all = new Totals();
  /** Indices into the trace's collectives, and numbers of ops, of the modules themselves, in order. */
  events: number[] = [];
  ops: number[] = [];
  /** Whether it or one of its children is shown. */
  shown = false;

  constructor(readonly path: string) {}
}

export const NO_MODULE = "";

export class Tree {
  readonly roots: ModuleRow[] = [];
  readonly rows: ModuleRow[] = [];
  private byPath = new Map<string | null, ModuleRow>();

  constructor(trace: Trace, folded: boolean) {
    const paths = pathsOf(trace);
    const names = folded ? foldedNames(paths) : new Map(paths.map((path) => [path, path]));
    const rows = new Map<string, ModuleRow>();
    for (const path of paths) {
      const name = names.get(path)!;
      let row = rows.get(name);
      if (!row) {
        rows.set(name, (row = new ModuleRow(name)));
        this.rows.push(row);
        const above = this.nearest(path);
        row.parent = above;
        row.label = above ? name.split(".").slice(above.path.split(".").length).join(".") : name;
        (above ? above.children : this.roots).push(row);
      }
      row.members.push(path);
      this.byPath.set(path, row);
    }
    if (trace.events.some((event) => event.site === null) || trace.opKinds.some((kind) => kind.site === null)) {
      const outside = new ModuleRow(NO_MODULE);
      outside.label = "outside all modules";
      this.byPath.set(null, outside);
      this.rows.push(outside);
      this.roots.push(outside);
    }
  }

  of(site: string | null): ModuleRow {
    return this.byPath.get(site)!;
  }

  /** The row of a path or its pattern. */
  find(path: string): ModuleRow | undefined {
    return this.byPath.get(path) ?? this.rows.find((row) => row.path === path) ?? this.rows.find((row) => row.members.some((member) => words.pathMatches(member, path)));
  }

  private nearest(path: string): ModuleRow | null {
    for (let end = path.lastIndexOf("."); end > 0; end = path.lastIndexOf(".", end - 1)) {
      const row = this.byPath.get(path.slice(0, end));
      if (row) return row;
    }
    return null;
  }

  /** Count the collectives that pass the filter. */
  count(trace: Trace, events: readonly number[], kinds: readonly boolean[], everything: boolean): void {
    for (const row of this.rows) {
      row.own = new Totals();
      row.all = new Totals();
      row.events = [];
      row.ops = [];
      row.shown = everything;
    }
    for (const index of events) {
      const event = trace.events[index]!;
      const [row, group, ns] = [this.of(event.site), trace.groupOf(event).label, trace.timeOf(event)];
      row.own.add(event, group, ns);
      row.events.push(index);
      for (let above: ModuleRow | null = row; above; above = above.parent) {
        above.all.add(event, group, ns);
        above.shown = true;
      }
    }
    for (let op = 0; op < trace.opKind.length; op++) {
      const kind = trace.opKind[op]!;
      if (!kinds[kind]) continue;
      const row = this.of(trace.opKinds[kind]!.site);
      row.ops.push(op);
      if (!everything) for (let above: ModuleRow | null = row; above && !above.shown; above = above.parent) above.shown = true;
    }
  }
}

/** All modules, and places that only collectives or ops name, parents before children, in model order. */
function pathsOf(trace: Trace): string[] {
  const paths = new Set(trace.modules.map((module) => module.path));
  const extra = new Set<string>();
  for (const event of trace.events) if (event.site !== null && !paths.has(event.site)) extra.add(event.site);
  for (const kind of trace.opKinds) if (kind.site !== null && !paths.has(kind.site)) extra.add(kind.site);
  const all = [...paths, ...[...extra].sort(words.natural)];
  // Children are below their parent even if they were called first.
  const first = new Map<string, number>();
  const prefixes = (path: string) => path.split(".").map((_, index, parts) => parts.slice(0, index + 1).join("."));
  all.forEach((path, place) => prefixes(path).forEach((prefix) => first.has(prefix) || first.set(prefix, place)));
  const keys = new Map(all.map((path) => [path, prefixes(path).map((prefix) => first.get(prefix)!)]));
  return all.sort((a, b) => lexically(keys.get(a)!, keys.get(b)!));
}

function lexically(one: readonly number[], other: readonly number[]): number {
  for (let index = 0; index < Math.min(one.length, other.length); index++) {
    const difference = one[index]! - other[index]!;
    if (difference) return difference;
  }
  return one.length - other.length;
}

function foldedNames(paths: readonly string[]): Map<string, string> {
  const byPattern = new Map<string, string[]>();
  for (const path of paths) {
    const key = words.pattern(path);
    const members = byPattern.get(key);
    if (members) members.push(path);
    else byPattern.set(key, [path]);
  }
  const names = new Map<string, string>();
  for (const [key, members] of byPattern) {
    const together = members.length >= FOLD_FROM && key.includes("#");
    const shared = together ? words.fold([...members].sort(words.natural)) : "";
    for (const path of members) names.set(path, shared || path);
  }
  return names;
}

// --- the visible rows

export type TreeRow =
  | { kind: "module"; key: string; depth: number; row: ModuleRow; open: boolean; leaf: boolean }
  | { kind: "parameter"; key: string; depth: number; parameter: Parameter; times: number }
  | { kind: "pass"; key: string; depth: number; row: ModuleRow; phase: number; tally: Tally; said: string; open: boolean; leaf: boolean }
  | { kind: "tally"; key: string; depth: number; op: string; group: string; tally: Tally }
  | { kind: "collective"; key: string; depth: number; event: Collective }
  | { kind: "op"; key: string; depth: number; op: number };

/** The visible rows in order. */
export function visibleRows(trace: Trace, tree: Tree, open: ReadonlySet<string>, noise: number): TreeRow[] {
  const rows: TreeRow[] = [];
  const modules = new Map(trace.modules.map((module) => [module.path, module]));
  const visit = (row: ModuleRow, depth: number) => {
    if (!row.shown) return;
    const key = row.path;
    const children = row.children.filter((child) => child.shown);
    const leaf = children.length === 0 && row.events.length === 0 && row.ops.length === 0 && (noise < 1 || !row.members.some((path) => modules.get(path)?.parameters.length));
    const isOpen = open.has(key) && !leaf;
    rows.push({ kind: "module", key, depth, row, open: isOpen, leaf });
    if (!isOpen) return;
    if (noise >= 1) {
      for (const { parameter, times } of parametersOf(row, modules)) {
        rows.push({ kind: "parameter", key: `${key}\np\n${rows.length}`, depth: depth + 1, parameter, times });
      }
    }
    passes(trace, row, depth + 1, open, noise, rows);
    for (const child of children) visit(child, depth + 1);
  };
  for (const root of tree.roots) visit(root, 0);
  return rows;
}

/** Equal parameters of folded modules once. */
export function parametersOf(row: ModuleRow, modules: ReadonlyMap<string, { parameters: Parameter[] }>): { parameter: Parameter; times: number }[] {
  const found = new Map<string, { parameter: Parameter; times: number }>();
  for (const path of row.members) {
    for (const parameter of modules.get(path)?.parameters ?? []) {
      const key = JSON.stringify(parameter);
      const known = found.get(key);
      if (known) known.times++;
      else found.set(key, { parameter, times: 1 });
    }
  }
  return [...found.values()];
}

function passes(trace: Trace, row: ModuleRow, depth: number, open: ReadonlySet<string>, noise: number, rows: TreeRow[]): void {
  const events: number[][] = PHASES.map(() => []);
  const ops: number[][] = PHASES.map(() => []);
  for (const index of row.events) events[trace.events[index]!.phase]!.push(index);
  for (const op of row.ops) ops[trace.opKinds[trace.opKind[op]!]!.phase]!.push(op);
  for (let phase = 0; phase < PHASES.length; phase++) {
    const [mine, others] = [events[phase]!, ops[phase]!];
    if (!mine.length && !others.length) continue;
    const key = `${row.path}\n${phase}`;
    const isOpen = open.has(key);
    const tallies = talliesOf(trace, mine);
    const said = [...tallies.values()].map(({ op, group, tally }) => `${tally.calls} ${words.opOn(trace, op, group)}`);
    if (others.length) said.push(`${others.length} tensor ${others.length === 1 ? "op" : "ops"}`);
    rows.push({ kind: "pass", key, depth, row, phase, tally: row.own.byPhase[phase]!, said: said.join(", "), open: isOpen, leaf: false });
    if (!isOpen) continue;
    if (noise === 0) {
      for (const [name, each] of tallies) rows.push({ kind: "tally", key: `${key}\n${name}`, depth: depth + 1, ...each });
      continue;
    }
    // Both are in order; an op is before the collective whose number it precedes.
    let next = 0;
    for (const index of mine) {
      const event = trace.events[index]!;
      while (next < others.length && trace.opBefore[others[next]!]! > 0 && trace.opBefore[others[next]!]! <= event.sequence) {
        rows.push(opRow(key, depth, others[next++]!));
      }
      rows.push({ kind: "collective", key: `${key}\n#${index}`, depth: depth + 1, event });
    }
    while (next < others.length) rows.push(opRow(key, depth, others[next++]!));
  }
}

function opRow(key: string, depth: number, op: number): TreeRow {
  return { kind: "op", key: `${key}\no${op}`, depth: depth + 1, op };
}

/** By op and group, costliest first. */
export function talliesOf(trace: Trace, events: readonly number[]): Map<string, { op: string; group: string; tally: Tally }> {
  const found = new Map<string, { op: string; group: string; tally: Tally }>();
  for (const index of events) {
    const event = trace.events[index]!;
    const group = trace.groupOf(event).label;
    const key = `${event.op}\n${group}`;
    let each = found.get(key);
    if (!each) found.set(key, (each = { op: event.op, group, tally: new Tally() }));
    each.tally.add(event.count, event.wireBytes * event.count, trace.timeOf(event));
  }
  return new Map([...found].sort(([, a], [, b]) => b.tally.bytes - a.tally.bytes || b.tally.calls - a.tally.calls));
}
