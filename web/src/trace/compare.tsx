import { useMemo, useState } from "preact/hooks";
import { Section, Shell } from "../shared/page";
import { Search, matches } from "../shared/search";
import { count, number, size } from "../shared/words";
import { type Column, Grid } from "./grid";
import type { Trace } from "./model";
import type { Change, Loaded } from "./read";
import { Tally } from "./tree";
import * as words from "./words";

/** The collectives of one place in both traces. */
interface Pair {
  before: Tally;
  after: Tally;
}

interface Side extends Pair {
  path: string;
  label: string;
  depth: number;
  children: Side[];
  /** By phase, op and group, of the module itself. */
  own: Map<string, Pair & { phase: number; op: string; group: string }>;
  differs: boolean;
}

type Row =
  | { kind: "module"; key: string; side: Side; open: boolean; leaf: boolean }
  | { kind: "kind"; key: string; depth: number; said: string; pair: Pair };

/** Two traces side by side: the changes in sentences, and every module with both figures. */
export function Compare({ loaded, narrow }: { loaded: Loaded; narrow: boolean }) {
  const [one, other] = loaded.traces as [Trace, Trace];
  const [names, comparison] = [loaded.head.names, loaded.head.comparison!];
  const perStep = comparison.per_step === true;
  const roots = useMemo(() => sideBySide(one, other, perStep), [one, other]);
  const [onlyChanged, setOnlyChanged] = useState(comparison.changes.length > 0);
  const [query, setQuery] = useState("");
  const [open, setOpen] = useState<ReadonlySet<string>>(() => new Set(everything(roots).filter((side) => side.differs).slice(0, 400).map((side) => side.path)));
  const [chosen, setChosen] = useState<string | null>(null);
  const rows = useMemo(() => visible(roots, open, onlyChanged, query.trim()), [roots, open, onlyChanged, query]);
  const known = one.bytesKnown && other.bytesKnown;
  function find(change: Change) {
    if (!change.module) return;
    const all = everything(roots);
    const inside = all.filter((side) => words.pathMatches(side.path, change.module === "the model" ? "*" : change.module!));
    const depth = Math.min(...inside.map((side) => side.depth));
    const found = inside.filter((side) => side.depth === depth);
    if (!found[0]) return;
    setQuery("");
    setOpen(new Set([...open, ...all.filter((side) => found.some(({ path }) => path === side.path || path.startsWith(`${side.path}.`))).map((side) => side.path)]));
    setChosen(found[0].path);
    document.getElementById("modules")?.scrollIntoView();
  }
  const columns: Column<Row>[] = [
    {
      id: "name", name: "Module", width: "minmax(18rem, 2.4fr)",
      cell: (row) => (row.kind === "module" ? <b class="clip mono" title={row.side.path}>{row.side.label}</b> : <span class="clip" title={row.said}>{row.said}</span>),
    },
    { id: "mark", name: "", width: narrow ? "1.2rem" : "2rem", cell: (row) => <Mark pair={pairOf(row)} within={row.kind === "module" && row.side.differs} /> },
    { id: "before", name: narrow ? "before" : "Calls before", width: narrow ? "3.4rem" : "minmax(6rem, 0.6fr)", numeric: true, cell: (row) => calls(pairOf(row).before) },
    { id: "after", name: "after", width: narrow ? "3.4rem" : "minmax(4.5rem, 0.6fr)", numeric: true, cell: (row) => calls(pairOf(row).after) },
    ...(known ? [
      ...(narrow ? [] : [
        { id: "bytes-before", name: "On the wire before", width: "minmax(9rem, 0.9fr)", numeric: true, cell: (row: Row) => bytes(pairOf(row).before) },
        { id: "bytes-after", name: "after", width: "minmax(5rem, 0.7fr)", numeric: true, cell: (row: Row) => bytes(pairOf(row).after) },
      ]),
      { id: "change", name: narrow ? "bytes" : "Change", width: narrow ? "4.2rem" : "minmax(5rem, 0.6fr)", numeric: true, cell: (row: Row) => percent(pairOf(row)) },
    ] : []),
  ];
  return (
    <Shell title="commlens compare" sections={[["changes", "Changes"], ["modules", "Side by side"]]}>
      <h1>{comparison.answer}</h1>
      <dl class="two">
        {[one, other].map((trace, index) => (
          <div key={index}>
            <dt>{index === 0 ? "Before" : "After"}</dt>
            <dd><span class="mono">{names[index]}</span><br /><span class="dim">rank {trace.rank} of {number(trace.worldSize)}, {count(trace.steps, "optimizer step")}, {count(trace.calls, "collective")}{known ? `, ${size(trace.wireBytes)} on the wire` : ""}</span></dd>
          </div>
        ))}
      </dl>
      {[...loaded.head.notes, ...comparison.notes].map((note) => <p key={note} class="dim">{note}</p>)}
      <Section id="changes" title="Changes" about={comparison.changes.length ? "Ordered by bytes. Select a change to see it in its module." : undefined}>
        {comparison.changes.length === 0 ? <p>Nothing changed. Times, lines of code and the order of issue are ignored.</p> : (
          <ol class="changes">
            {comparison.changes.map((change, index) => (
              <li key={index}>
                <span class={`kind kind-${change.kind}`}>{KINDS[change.kind] ?? change.kind}</span>
                {change.module ? <button type="button" class="as-link" onClick={() => find(change)}>{sentenceOf(change)}</button> : <span>{sentenceOf(change)}</span>}
              </li>
            ))}
          </ol>
        )}
      </Section>
      <Section
        id="modules"
        title="Side by side"
        about={`Each module with its children, in both traces${perStep ? `; figures are per step${comparedApart(one, other) ? ", without the setup before the first forward" : ""}` : ""}.`}
      >
        <div class="controls">
          <Search value={query} onInput={setQuery} label="Search modules and ops" />
          <span class="buttons">
            <button type="button" class="button" aria-pressed={onlyChanged} onClick={() => setOnlyChanged(!onlyChanged)}>Only differences</button>
            <button type="button" class="button" onClick={() => setOpen(new Set(everything(roots).map((side) => side.path)))}>Open all</button>
            <button type="button" class="button" onClick={() => setOpen(new Set())}>Close all</button>
          </span>
        </div>
        <Grid
          label="Modules in both traces"
          columns={columns}
          rows={rows}
          keyOf={(row) => row.key}
          level={(row) => (row.kind === "module" ? { depth: row.side.depth, open: row.leaf ? undefined : row.open } : { depth: row.depth, open: undefined })}
          onOpen={(row, isOpen) => {
            const next = new Set(open);
            if (isOpen) next.add(row.key);
            else next.delete(row.key);
            setOpen(next);
          }}
          onChoose={(row) => setChosen(row.key)}
          chosen={chosen}
          rowClass={(row) => mark(pairOf(row))}
          most={24}
          stacked={narrow ? 2 : 0}
          wraps={1100}
          empty={onlyChanged ? "No module issues more or fewer collectives than before." : "No module matches the search."}
        />
      </Section>
    </Shell>
  );
}

const KINDS: Record<string, string> = { "world-size": "world" };

/** Drop the word that the mark before the sentence already shows. */
function sentenceOf(change: Change): string {
  return change.sentence.startsWith(`${change.kind}: `) ? change.sentence.slice(change.kind.length + 2) : change.sentence;
}

function pairOf(row: Row): Pair {
  return row.kind === "module" ? row.side : row.pair;
}

function mark({ before, after }: Pair): "added" | "removed" | "changed" | "same" {
  if (!before.calls && after.calls) return "added";
  if (before.calls && !after.calls) return "removed";
  return before.calls === after.calls && before.bytes === after.bytes ? "same" : "changed";
}

function Mark({ pair, within }: { pair: Pair; within: boolean }) {
  const kind = mark(pair);
  const [sign, said] = { added: ["+", "new"], removed: ["−", "gone"], changed: ["≠", "changed"], same: within ? ["·", "something inside changed"] : ["", ""] }[kind] as [string, string];
  return sign ? <span class={`mark-${kind}`} role="img" title={said} aria-label={said}>{sign}</span> : null;
}

function calls(tally: Tally): string {
  return tally.calls ? number(tally.calls) : "";
}

function bytes(tally: Tally): string {
  return tally.calls ? size(tally.bytes) : "";
}

function percent({ before, after }: Pair): string {
  if (before.bytes === after.bytes) return "";
  if (!before.bytes) return "new";
  if (!after.bytes) return "gone";
  const share = (100 * after.bytes) / before.bytes - 100;
  return `${share > 0 ? "+" : "−"}${Math.abs(share) < 10 ? Math.abs(share).toFixed(1) : Math.round(Math.abs(share))}%`;
}

/** The class of the model, if there is only one. */
function rootOf(trace: Trace): string | null {
  const roots = new Set([...trace.modules.map((module) => module.path), ...trace.events.flatMap((event) => event.site ?? [])].map((path) => path.split(".")[0]!));
  return roots.size === 1 ? [...roots][0]! : null;
}

/** Whether the setup before the first forward, which no step repeats, is left out of figures per step. */
function comparedApart(one: Trace, other: Trace): boolean {
  return one.setupUntil !== null && other.setupUntil !== null && one.setupUntil + other.setupUntil > 0;
}

function sideBySide(one: Trace, other: Trace, perStep: boolean): Side[] {
  const names = [rootOf(one), rootOf(other)];
  const renamed = names[0] !== names[1] && names.every((name) => name !== null);
  const plain = (path: string) => (renamed && path ? `model${path.slice(path.split(".")[0]!.length)}` : path);
  const sides = new Map<string, Side>();
  const roots: Side[] = [];
  const get = (path: string): Side => {
    const known = sides.get(path);
    if (known) return known;
    const side: Side = { path, label: path || "outside all modules", depth: 0, children: [], before: new Tally(), after: new Tally(), own: new Map(), differs: false };
    sides.set(path, side);
    const dot = path.lastIndexOf(".");
    if (dot > 0) {
      const above = get(path.slice(0, dot));
      side.label = path.slice(dot + 1);
      side.depth = above.depth + 1;
      above.children.push(side);
    } else roots.push(side);
    return side;
  };
  for (const trace of [one, other]) for (const module of trace.modules) get(plain(module.path));
  const apart = perStep && comparedApart(one, other);
  const add = (trace: Trace, which: "before" | "after") => {
    for (const event of trace.events) {
      const group = trace.groupOf(event).label;
      const side = get(plain(event.site ?? ""));
      const key = `${event.phase}\n${event.op}\n${group}`;
      let own = side.own.get(key);
      if (!own) side.own.set(key, (own = { before: new Tally(), after: new Tally(), phase: event.phase, op: event.op, group }));
      if (apart && trace.isSetup(event)) continue;
      const share = perStep ? 1 / trace.steps : 1;
      const [calls, bytes, ns] = [event.count * share, event.wireBytes * event.count * share, trace.timeOf(event) * share];
      own[which].add(calls, bytes, ns);
      for (let path = side.path; ; path = path.slice(0, path.lastIndexOf("."))) {
        sides.get(path)![which].add(calls, bytes, ns);
        if (!path.includes(".")) break;
      }
    }
  };
  add(one, "before");
  add(other, "after");
  for (const side of [...sides.values()].reverse()) {
    side.children.sort((a, b) => words.natural(a.path, b.path));
    side.differs = mark(side) !== "same" || [...side.own.values()].some((pair) => mark(pair) !== "same");
  }
  const spread = (side: Side): boolean => {
    for (const child of side.children) side.differs = spread(child) || side.differs;
    return side.differs;
  };
  roots.forEach(spread);
  return roots;
}

function everything(roots: readonly Side[]): Side[] {
  return roots.flatMap((side) => [side, ...everything(side.children)]);
}

function visible(roots: readonly Side[], open: ReadonlySet<string>, onlyChanged: boolean, query: string): Row[] {
  const rows: Row[] = [];
  const wanted = new Map<Side, boolean>();
  const want = (side: Side): boolean => {
    const inside = side.children.map(want).some(Boolean);
    const found = !query || matches(`${side.path || "outside all modules"} ${[...side.own.values()].map(({ op, group }) => `${op} ${group}`).join(" ")}`, query);
    const is = (inside || found) && (!onlyChanged || side.differs) && (side.before.calls + side.after.calls > 0);
    wanted.set(side, is);
    return is;
  };
  roots.forEach(want);
  const visit = (side: Side) => {
    if (!wanted.get(side)) return;
    const own = [...side.own].filter(([, pair]) => !onlyChanged || mark(pair) !== "same").sort(([, a], [, b]) => a.phase - b.phase || b.after.bytes - a.after.bytes);
    const children = side.children.filter((child) => wanted.get(child));
    const leaf = own.length + children.length === 0;
    const isOpen = open.has(side.path) && !leaf;
    rows.push({ kind: "module", key: side.path, side, open: isOpen, leaf });
    if (!isOpen) return;
    for (const [key, pair] of own) rows.push({ kind: "kind", key: `${side.path}\n${key}`, depth: side.depth + 1, said: `${side.path ? words.phaseWithin(pair.phase) : words.phase(pair.phase)}: ${pair.op} on ${pair.group}`, pair });
    children.forEach(visit);
  };
  roots.forEach(visit);
  return rows;
}
