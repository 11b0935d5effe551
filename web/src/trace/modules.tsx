import { useMemo } from "preact/hooks";
import { Section } from "../shared/page";
import { number, seconds, size } from "../shared/words";
import { type Column, Grid } from "./grid";
import { PHASES, type Trace } from "./model";
import { parameterShape } from "./parameters";
import { type Tally, type Tree, type TreeRow, visibleRows } from "./tree";
import * as words from "./words";

interface ModulesProps {
  trace: Trace;
  tree: Tree;
  /** Changes whenever the tree is recounted. */
  counted: unknown;
  open: ReadonlySet<string>;
  onOpen: (open: ReadonlySet<string>) => void;
  noise: number;
  onNoise: (noise: number) => void;
  folded: boolean;
  onFold: (folded: boolean) => void;
  colours: ReadonlyMap<string, string>;
  narrow: boolean;
  chosen: string | null;
  onChoose: (row: TreeRow) => void;
}

const NOISE = [
  "shows counts",
  "shows counts, single collectives, parameters and DTensor ops",
  "shows other tensor ops, too",
  "shows everything, even trivial ops such as views and detach",
];

export function Modules(props: ModulesProps) {
  const { trace, tree, counted, open, onOpen, noise, onNoise, folded, onFold, colours, narrow } = props;
  const rows = useMemo(() => visibleRows(trace, tree, open, noise), [trace, tree, counted, open, noise]);
  const phases = PHASES.map((_, phase) => phase).filter((phase) => tree.roots.some((row) => row.path && row.all.byPhase[phase]!.calls));
  const columns: Column<TreeRow>[] = [
    { id: "name", name: "Module", width: narrow ? "minmax(7rem, 1fr)" : "minmax(17rem, 2.2fr)", cell: (row) => <Name row={row} trace={trace} noise={noise} /> },
    ...(narrow ? [] : phases.map((phase): Column<TreeRow> => ({
      id: PHASES[phase]!, name: words.phaseWithin(phase), width: PHASES[phase]!.length > 10 ? "minmax(8.6rem, 1fr)" : "minmax(6.4rem, 1fr)", numeric: true,
      cell: (row) => (row.kind === "module" ? <Amount tally={row.row.all.byPhase[phase]!} trace={trace} /> : null),
    }))),
    { id: "calls", name: "Calls", width: narrow ? "minmax(3rem, 1fr)" : "minmax(3.6rem, 0.5fr)", numeric: true, cell: (row) => calls(row) },
    ...(trace.bytesKnown ? [{ id: "bytes", name: narrow ? "Bytes" : "On the wire", width: narrow ? "minmax(4.8rem, 1fr)" : "minmax(5.2rem, 0.7fr)", numeric: true, cell: (row: TreeRow) => bytes(row) }] : []),
    ...(hasTime(trace) ? [{ id: "time", name: trace.estimate ? "Estimated" : "Time", width: narrow ? "minmax(4.8rem, 1fr)" : "minmax(4.8rem, 0.6fr)", numeric: true, cell: (row: TreeRow) => time(row, trace) }] : []),
    ...(narrow || !trace.groupsKnown ? [] : [{ id: "on", name: "On", width: "minmax(8rem, 1fr)", cell: (row: TreeRow) => <On row={row} trace={trace} colours={colours} /> }]),
  ];
  function toggle(row: TreeRow, isOpen: boolean) {
    const next = new Set(open);
    if (isOpen) next.add(row.key);
    else next.delete(row.key);
    onOpen(next);
  }
  return (
    <Section
      id="modules"
      title="Modules"
      about={`The communication of each module, including its children. Open a module to see its phases, and a phase to see its collectives${trace.opKind.length ? " and tensor ops" : ""} in order.`}
    >
      <div class="controls">
        <span class="noise">
          <label for="detail">Level of detail</label>
          <input
            id="detail" type="range" min={0} max={3} step={1} value={noise}
            aria-valuetext={`${noise} of 3: ${NOISE[noise]}`}
            onInput={(event) => onNoise(Number(event.currentTarget.value))}
          />
          <output for="detail"><b>{noise}</b> of 3: {NOISE[noise]}</output>
        </span>
        <span class="buttons">
          <button type="button" class="button" aria-pressed={folded} onClick={() => onFold(!folded)}>Fold similar modules</button>
          <button type="button" class="button" onClick={() => onOpen(new Set(tree.rows.map((row) => row.path)))}>Open all</button>
          <button type="button" class="button" onClick={() => onOpen(new Set())}>Close all</button>
        </span>
      </div>
      <Grid
        label="Modules"
        columns={columns}
        rows={rows}
        keyOf={(row) => row.key}
        level={(row) => ({ depth: row.depth, open: row.kind === "module" || row.kind === "pass" ? (row.leaf ? undefined : row.open) : undefined })}
        onOpen={toggle}
        onChoose={props.onChoose}
        chosen={props.chosen}
        rowClass={(row) => `row-${row.kind}`}
        wide={(row) => (row.kind === "module" || narrow ? 1 : 1 + phases.length)}
        most={22}
        stacked={narrow ? 2 : 0}
        wraps={1100}
        empty="No module matches the filters."
      />
    </Section>
  );
}

export function hasTime(trace: Trace): boolean {
  return trace.durationsKnown || trace.estimate !== null;
}

function Name({ row, trace, noise }: { row: TreeRow; trace: Trace; noise: number }) {
  if (row.kind === "module") {
    const many = row.row.members.length;
    const type = noise >= 1 ? typeOf(row.row.members, trace) : "";
    return (
      <span class="clip" title={row.row.path || undefined}>
        <b class="mono">{row.row.label}</b>
        {many > 1 && <span class="dim"> × {number(many)}</span>}
        {type && <span class="dim"> {type}</span>}
      </span>
    );
  }
  if (row.kind === "pass") return <span class="clip" title={row.said}>{row.row.path ? words.phaseWithin(row.phase) : words.phase(row.phase)} <span class="dim">{row.said}</span></span>;
  if (row.kind === "tally") return <span class="clip mono">{words.opOn(trace, row.op, row.group)}</span>;
  if (row.kind === "parameter") {
    const { parameter, times } = row;
    return (
      <span class="clip mono" title={parameter.mesh || undefined}>
        {parameter.name}{times > 1 ? ` × ${times}` : ""} <span class="placement">{words.placements(parameter.placements) || "not a DTensor"}</span>{" "}
        <span class="dim">{parameterShape(parameter)}</span>
      </span>
    );
  }
  if (row.kind === "collective") {
    const said = [words.why(row.event), words.sourceWords(row.event)].filter(Boolean).join(", ");
    return <span class="clip" title={said}><span class="mono">{words.title(trace, row.event)}</span> <span class="dim">{said}</span></span>;
  }
  const kind = trace.opKinds[trace.opKind[row.op]!]!;
  return <span class="clip mono" title={opInputs(kind)}>{kind.name} <span class="dim">{opInputs(kind)}</span></span>;
}

export function opInputs(kind: { shapes: string[]; placements: string[] }): string {
  const inputs = kind.shapes.map((shape, index) => (kind.placements[index] !== undefined ? `${shape} ${words.placements(kind.placements[index])}` : shape));
  return [...inputs, ...kind.placements.slice(kind.shapes.length).map(words.placements)].join(", ");
}

export function typeOf(members: readonly string[], trace: Trace): string {
  const wanted = new Set(members);
  const types = new Set(trace.modules.filter((module) => wanted.has(module.path)).map((module) => module.type.slice(module.type.lastIndexOf(".") + 1)));
  return [...types].join(", ");
}

function Amount({ tally, trace }: { tally: Tally; trace: Trace }) {
  if (!tally.calls) return null;
  return <>{number(tally.calls)}{trace.bytesKnown && <span class="dim"> · {size(tally.bytes)}</span>}</>;
}

function tallyOf(row: TreeRow): Tally | null {
  if (row.kind === "module") return row.row.all.sum;
  return row.kind === "pass" || row.kind === "tally" ? row.tally : null;
}

function calls(row: TreeRow): string {
  if (row.kind === "collective") return row.event.count > 1 ? number(row.event.count) : "";
  const tally = tallyOf(row);
  return tally?.calls ? number(tally.calls) : "";
}

function bytes(row: TreeRow): string {
  if (row.kind === "collective") return size(row.event.wireBytes * row.event.count);
  const tally = tallyOf(row);
  return tally?.calls ? size(tally.bytes) : "";
}

function time(row: TreeRow, trace: Trace): string {
  if (row.kind === "collective") return trace.timeOf(row.event) ? seconds(trace.timeOf(row.event) / 1e9) : "";
  const tally = tallyOf(row);
  return tally?.ns ? seconds(tally.ns / 1e9) : "";
}

function On({ row, trace, colours }: { row: TreeRow; trace: Trace; colours: ReadonlyMap<string, string> }) {
  if (row.kind === "collective") return <span class="clip">{words.onGroup(trace.groupOf(row.event))}</span>;
  if (row.kind !== "module" || !row.row.all.sum.calls) return null;
  const all = row.row.all;
  const total = all.sum.bytes || all.sum.calls;
  const parts = [...all.byGroup].map(([label, tally]) => ({ label, share: (all.sum.bytes ? tally.bytes : tally.calls) / total })).sort((a, b) => b.share - a.share);
  return (
    <span class="on" title={parts.map(({ label, share }) => `${label} ${Math.round(share * 100)}%`).join(", ")}>
      <span class="on-bar" aria-hidden="true">
        {parts.map(({ label, share }) => <span key={label} style={{ width: `${share * 100}%`, background: `var(${colours.get(label) ?? "--idle"})` }} />)}
      </span>
      <span class="clip">{parts.slice(0, 3).map(({ label }) => label).join(", ")}</span>
    </span>
  );
}
