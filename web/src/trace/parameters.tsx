import { useMemo } from "preact/hooks";
import { Breakable } from "../shared/breakable";
import { Section } from "../shared/page";
import { matches } from "../shared/search";
import { count, size } from "../shared/words";
import type { Filter } from "./filter";
import { type Column, Grid } from "./grid";
import type { Parameter, Trace } from "./model";
import { type Tree, parametersOf } from "./tree";
import * as words from "./words";

interface Row {
  path: string;
  parameter: Parameter;
  times: number;
}

export function parameterShape(parameter: Parameter): string {
  return [parameter.shape ? `[${parameter.shape.join(", ")}]` : "", parameter.dtype].filter(Boolean).join(" ");
}

/** The parameters of the modules and their sharding. */
export function Parameters({ trace, tree, filter, narrow }: { trace: Trace; tree: Tree; filter: Filter; narrow: boolean }) {
  const rows = useMemo(() => {
    const modules = new Map(trace.modules.map((module) => [module.path, module]));
    const all = tree.rows.flatMap((row) => parametersOf(row, modules).map((each): Row => ({ path: row.path, ...each })));
    const query = filter.text.trim();
    return all.filter(({ path, parameter }) =>
      (!filter.module || words.pathMatches(path, filter.module) || tree.find(filter.module)?.path === path) &&
      (!query || matches(`${path}.${parameter.name} ${parameter.placements} ${parameter.dtype}`, query)));
  }, [trace, tree, filter]);
  const held = rows.reduce((sum, { parameter, times }) => sum + (parameter.localBytes ?? 0) * times, 0);
  const whole = rows.some(({ parameter }) => parameter.localBytes !== null);
  const columns: Column<Row>[] = [
    {
      id: "name", name: narrow ? "Parameter and sharding" : "Parameter", width: "minmax(14rem, 2fr)",
      cell: ({ path, parameter, times }) => (
        <span class="clip mono" title={`${path}.${parameter.name}`}>
          <Breakable text={`${path}.${parameter.name}`} />{times > 1 ? <span class="dim"> × {times}</span> : ""}{" "}
          {narrow && <span class="placement">{words.placements(parameter.placements) || "not a DTensor"}</span>}
        </span>
      ),
    },
    ...(narrow ? [] : [{ id: "placements", name: "Sharding", width: "minmax(9rem, 1.4fr)", cell: ({ parameter }: Row) => <span class="clip mono" title={words.placements(parameter.placements)}>{words.placements(parameter.placements) || <span class="dim">not a DTensor</span>}</span> }]),
    ...(whole ? [
      { id: "shape", name: "Shape", width: "minmax(8rem, 1fr)", cell: ({ parameter }: Row) => <span class="clip mono" title={parameterShape(parameter)}>{parameterShape(parameter)}</span> },
      { id: "held", name: "Held here", width: "minmax(5rem, 0.6fr)", numeric: true, cell: ({ parameter }: Row) => (parameter.localBytes === null ? "" : size(parameter.localBytes)) },
    ] : []),
    ...(narrow ? [] : [{ id: "mesh", name: "Mesh", width: "minmax(9rem, 1.5fr)", cell: ({ parameter }: Row) => <span class="clip dim" title={parameter.mesh}>{words.mesh(parameter.mesh)}</span> }]),
  ];
  return (
    <Section
      id="parameters"
      title="Parameters"
      about={whole ? `Sharding between steps. Rank ${trace.rank} holds ${size(held)} of these parameters.` : `Sharding of ${count(rows.length, "parameter")}.`}
    >
      <Grid
        label="Parameters"
        columns={columns}
        rows={rows}
        stacked={narrow ? 2 : 0}
        wraps={1300}
        keyOf={({ path, parameter }) => `${path}.${parameter.name} ${JSON.stringify(parameter)}`}
        empty={trace.modules.some((module) => module.parameters.length) ? "No parameter matches the filters." : "The trace has no parameters."}
      />
    </Section>
  );
}
