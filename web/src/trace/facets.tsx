import { count, number, size } from "../shared/words";
import { type Facet, type Filter, matching } from "./filter";
import type { Collective, Trace } from "./model";
import { Tally } from "./tree";
import * as words from "./words";

interface FacetsProps {
  trace: Trace;
  filter: Filter;
  colours: ReadonlyMap<string, string>;
  onChange: (filter: Filter) => void;
}

/** Collectives and bytes by group, phase and op. Selecting a row filters the page by it. */
export function Facets({ trace, filter, colours, onChange }: FacetsProps) {
  const groups = new Map(trace.groups.map((group) => [group.label, group]));
  return (
    <div class="facets">
      {trace.groupsKnown && (
        <FacetTable
          {...{ trace, filter, onChange }}
          facet="groups"
          name="Mesh dimension or group"
          of={(event) => trace.groupOf(event).label}
          shown={(label) => `${label}${groups.get(label)?.ranks.length ? ` (${count(groups.get(label)!.ranks.length, "rank")})` : ""}`}
          colour={(label) => colours.get(label)}
        />
      )}
      <FacetTable {...{ trace, filter, onChange }} facet="phases" name="Phase" of={(event) => event.phase} shown={words.phase} />
      <FacetTable {...{ trace, filter, onChange }} facet="ops" name="Collective" of={(event) => event.op} shown={(op) => op} />
    </div>
  );
}

interface TableProps<V> extends Omit<FacetsProps, "colours"> {
  facet: Facet;
  name: string;
  of: (event: Collective) => V;
  shown: (value: V) => string;
  colour?: (value: V) => string | undefined;
}

const MOST = 8;

function FacetTable<V extends string | number>({ trace, filter, onChange, facet, name, of, shown, colour }: TableProps<V>) {
  const chosen = filter[facet] as unknown as ReadonlySet<V>;
  const tallies = new Map<V, Tally>();
  for (const index of matching(trace, filter, facet)) {
    const event = trace.events[index]!;
    let tally = tallies.get(of(event));
    if (!tally) tallies.set(of(event), (tally = new Tally()));
    tally.add(event.count, event.wireBytes * event.count, trace.timeOf(event));
  }
  for (const value of chosen) if (!tallies.has(value)) tallies.set(value, new Tally());
  const rows = [...tallies].sort(([a, one], [b, other]) => (facet === "phases" ? Number(a) - Number(b) : other.bytes - one.bytes || other.calls - one.calls));
  const known = trace.bytesKnown;
  const most = Math.max(1, ...rows.map(([, tally]) => (known ? tally.bytes : tally.calls)));
  function toggle(value: V) {
    const next = new Set(chosen);
    if (!next.delete(value)) next.add(value);
    onChange({ ...filter, [facet]: next });
  }
  return (
    <div class="facet" role="group" aria-label={`Filter by ${name.toLowerCase()}`}>
      <h3>{name}</h3>
      {rows.slice(0, MOST).map(([value, tally]) => (
        <button key={value} type="button" class="facet-row" aria-pressed={chosen.has(value)} onClick={() => toggle(value)}>
          <span class="facet-bar" style={{ width: `${(100 * (known ? tally.bytes : tally.calls)) / most}%`, background: `var(${colour?.(value) ?? "--idle"})` }} />
          <span class="facet-name">{shown(value)}</span>
          <span class="numeric">{number(tally.calls)}</span>
          {known && <span class="numeric">{size(tally.bytes)}</span>}
        </button>
      ))}
      {rows.length > MOST && <p class="dim">{count(rows.length - MOST, "more", "more")}; the search finds them.</p>}
    </div>
  );
}
