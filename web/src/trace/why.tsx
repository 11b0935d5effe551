import { useMemo, useState } from "preact/hooks";
import { Section } from "../shared/page";
import { capital, number, seconds, size } from "../shared/words";
import { Clipped, type Column, Grid } from "./grid";
import type { Trace } from "./model";
import { hasTime } from "./modules";
import { BY, type By, type Reason, reasons } from "./reasons";

interface WhyProps {
  trace: Trace;
  events: readonly number[];
  narrow: boolean;
  chosen: string | null;
  onChoose: (reason: Reason) => void;
}

function parts(sentence: string): { text: string; line: string } {
  const end = sentence.lastIndexOf(", at ");
  return end < 0 ? { text: sentence, line: "" } : { text: sentence.slice(0, end), line: sentence.slice(end) };
}

/** The reasons for the collectives, costliest first. */
export function Why({ trace, events, narrow, chosen, onChoose }: WhyProps) {
  const [by, setBy] = useState<By>("reason");
  const found = useMemo(() => reasons(trace, events, by), [trace, events, by]);
  const total = found.reduce((sum, reason) => sum + reason.tally.bytes, 0);
  const columns: Column<Reason>[] = [
    { id: "why", name: capital(BY[by]), width: narrow ? "minmax(12rem, 1fr)" : "minmax(17rem, 5fr)", cell: (reason) => (narrow ? <span class="clip" title={reason.sentence}>{reason.sentence}</span> : <Clipped {...parts(reason.sentence)} />) },
    { id: "calls", name: "Calls", width: narrow ? "minmax(3rem, 1fr)" : "4rem", numeric: true, cell: (reason) => number(reason.tally.calls) },
    ...(trace.bytesKnown ? [{ id: "bytes", name: narrow ? "Bytes" : "On the wire", width: narrow ? "minmax(5.5rem, 1fr)" : "5.5rem", numeric: true, cell: (reason: Reason) => size(reason.tally.bytes) }] : []),
    ...(trace.bytesKnown && !narrow ? [{
      id: "share", name: "Share", width: "4rem", numeric: true, cell: (reason: Reason) => (total ? `${Math.round((100 * reason.tally.bytes) / total)}%` : ""),
    }] : []),
    ...(hasTime(trace) && !narrow ? [{ id: "time", name: trace.estimate ? "Estimated" : "Time", width: "5rem", numeric: true, cell: (reason: Reason) => seconds(reason.tally.ns / 1e9) }] : []),
  ];
  return (
    <Section
      id="why"
      title="Why"
      about="One row per place and cause: the owner of the parameters, the redistribution that DTensor chose (implicit) or the program requested (explicit), and the line of code."
      tools={
        <label class="choice">
          by <select value={by} onChange={(event) => setBy(event.currentTarget.value as By)}>
            {Object.entries(BY).map(([key, name]) => <option key={key} value={key}>{name}</option>)}
          </select>
        </label>
      }
    >
      <Grid label="Why" columns={columns} rows={found} keyOf={(reason) => reason.key} onChoose={onChoose} chosen={chosen} most={14} stacked={narrow ? 4 : 0} wraps={1300} empty="No collective matches the filters." />
    </Section>
  );
}
