import { useState } from "preact/hooks";
import { Breakable } from "../shared/breakable";
import { Section } from "../shared/page";
import { Sideways } from "../shared/sideways";
import { Tabs } from "../shared/tabs";
import type { Cell, Table, VerdictPage } from "./data";
import { RankSet, RoleChip } from "./parts";

const STATES: Record<string, string> = {
  completed: "completed",
  "in-flight": "in flight",
  failed: "failed",
  unknown: "completion unknown",
  absent: "",
  overwritten: "",
};

/** The collectives around the fault, side by side. */
export function Aligned({ page }: { page: VerdictPage }) {
  const [chosen, setChosen] = useState("0");
  if (page.tables.length === 0) return null;
  const tabs = page.tables.map((table, index) => ({ id: `table-${index}`, name: table.name, body: () => <One key={index} table={table} /> }));
  return (
    <Section id="issued" title="Collectives side by side">
      <Tabs tabs={tabs} chosen={tabs[Number(chosen)]?.id ?? ""} onChoose={(id) => setChosen(id.slice("table-".length))} label="Group" />
    </Section>
  );
}

function One({ table }: { table: Table }) {
  return (
    <>
      <p class="about">{table.about}</p>
      <Sideways class="table-scroll" label={`Collectives: ${table.name}`}>
        <table class="aligned">
          <thead>
            <tr>
              <th scope="col"><span class="off-screen">Number</span></th>
              {table.columns.map((column, index) => (
                <th key={index} scope="col"><RankSet ranks={column.ranks} /> <RoleChip role={column.role} /></th>
              ))}
            </tr>
          </thead>
          <tbody>
            {table.rows.map((row) => (
              <tr key={row.number} class={row.fault ? "fault" : ""}>
                <th scope="row">{row.number}{row.note && <span class="row-note">{row.note}</span>}</th>
                {row.cells.map((cell, index) => <Issued key={index} cell={cell} />)}
              </tr>
            ))}
          </tbody>
        </table>
      </Sideways>
      {table.left_out && <p class="dim">{table.left_out}</p>}
    </>
  );
}

function Issued({ cell }: { cell: Cell }) {
  const state = cell.state ?? "completed";
  return (
    <td class={`issued state-${state} ${cell.differs ? "differs" : ""}`}>
      <div class="issued-op">
        {cell.differs && <span class="differs-mark" title="differs from the others">≠<span class="off-screen"> differs: </span></span>}
        {cell.op}
      </div>
      {cell.what && <div class="mono"><Breakable text={cell.what} /></div>}
      {cell.place && <div class="mono dim"><Breakable text={cell.place} /></div>}
      {(STATES[state] || cell.late) && <div class={`issued-state ${state}`}>{[state === "completed" ? "" : STATES[state], cell.late].filter(Boolean).join(", ")}</div>}
    </td>
  );
}
