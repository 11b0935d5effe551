import { useState } from "preact/hooks";
import { Section } from "../shared/page";
import { count, number, size } from "../shared/words";
import type { Trace } from "./model";
import type { ModuleRow, Tree } from "./tree";

interface BytesProps {
  trace: Trace;
  tree: Tree;
  counted: unknown;
  colours: ReadonlyMap<string, string>;
  onChoose: (row: ModuleRow) => void;
}

interface Block {
  row: ModuleRow;
  depth: number;
  left: number;
  width: number;
}

const HEIGHT = 34;
const LEAST = 0.12; // smallest visible block, in percent of the width

/** The modules as an icicle chart: width shows bytes on the wire, children are under their parents. */
export function Bytes({ trace, tree, colours, onChoose }: BytesProps) {
  const [root, setRoot] = useState<ModuleRow | null>(null);
  const top = root && tree.rows.includes(root) && weigh(root, trace) > 0 ? root : null;
  const blocks = lay(top ? [top] : tree.roots, trace);
  const depth = Math.max(0, ...blocks.map((block) => block.depth)) + 1;
  const what = trace.bytesKnown ? "bytes on the wire" : "collectives";
  const labels = [...colours].slice(0, 6);
  return (
    <Section
      id="bytes"
      title={trace.bytesKnown ? "Bytes" : "Shares"}
      about={`Width shows ${what}; child modules are below their parent. Where nothing is below, the module issued the collectives itself. Select a module to enlarge it.`}
      tools={top ? <button type="button" class="button" onClick={() => setRoot(top.parent)}>Back to {top.parent?.path ?? "the whole model"}</button> : undefined}
    >
      {blocks.length === 0 ? <p class="dim">Nothing to show.</p> : (
        <div class="icicle" role="group" aria-label={`Modules by ${what}`} style={{ height: `${depth * HEIGHT}px` }}>
          {blocks.map(({ row, depth, left, width }) => {
            const said = `${row.path || "outside all modules"}: ${trace.bytesKnown ? `${size(row.all.sum.bytes)}, ` : ""}${count(row.all.sum.calls, "collective")}${row.members.length > 1 ? `, ${number(row.members.length)} modules` : ""}`;
            return (
              <button
                key={row.path}
                type="button"
                class="block"
                aria-label={said}
                title={said}
                style={{ left: `${left}%`, width: `${width}%`, top: `${depth * HEIGHT}px`, height: `${HEIGHT - 2}px`, background: `var(${colours.get(mainGroup(row)) ?? "--idle"})` }}
                onClick={() => {
                  setRoot(row.children.some((child) => weigh(child, trace)) ? row : row.parent);
                  onChoose(row);
                }}
              >
                {width > 3 && <span class="clip"><span>{row.label}</span> <small>{trace.bytesKnown ? size(row.all.sum.bytes) : number(row.all.sum.calls)}</small></span>}
              </button>
            );
          })}
        </div>
      )}
      {labels.length > 1 && trace.groupsKnown && (
        <p class="legend dim">The colour shows the group with most of the {trace.bytesKnown ? "bytes" : "collectives"}: {labels.map(([label, colour]) => <span key={label} class="legend-item"><span class="swatch" style={{ background: `var(${colour})` }} />{label}</span>)}</p>
      )}
    </Section>
  );
}

function weigh(row: ModuleRow, trace: Trace): number {
  return trace.bytesKnown ? row.all.sum.bytes : row.all.sum.calls;
}

function mainGroup(row: ModuleRow): string {
  let [most, found] = [-1, ""];
  for (const [label, tally] of row.all.byGroup) {
    const weight = tally.bytes + tally.calls / 1e9;
    if (weight > most) [most, found] = [weight, label];
  }
  return found;
}

function lay(rows: readonly ModuleRow[], trace: Trace): Block[] {
  const total = rows.reduce((sum, row) => sum + weigh(row, trace), 0);
  const blocks: Block[] = [];
  if (!total) return blocks;
  const visit = (row: ModuleRow, depth: number, left: number) => {
    const width = (100 * weigh(row, trace)) / total;
    if (width < LEAST) return width;
    blocks.push({ row, depth, left, width });
    let next = left;
    for (const child of row.children) next += visit(child, depth + 1, next);
    return width;
  };
  let left = 0;
  for (const row of rows) left += visit(row, 0, left);
  return blocks;
}
