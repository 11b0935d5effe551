import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { useMedia } from "../shared/media";
import { Shell } from "../shared/page";
import { anchor, setAnchor } from "../shared/route";
import { Search } from "../shared/search";
import { count, number, seconds, size } from "../shared/words";
import { Bytes } from "./bytes";
import { groupColours } from "./colours";
import { Compare } from "./compare";
import { type Chosen, Details } from "./details";
import { Empty } from "./drop";
import { Facets } from "./facets";
import { EVERYTHING, type Filter, type View, fromAddress, isActive, matching, opKindsShown, toAddress } from "./filter";
import type { Collective, Trace } from "./model";
import { Modules, hasTime } from "./modules";
import { Parameters } from "./parameters";
import type { Loaded, Progress } from "./read";
import { Sequence } from "./sequence";
import { Tree, type TreeRow } from "./tree";
import { Why } from "./why";
import * as words from "./words";

/** The page: its trace, or an empty viewer to drop a file on. */
export function App({ carried, progress }: { carried: Loaded | null; progress: Progress }) {
  const [loaded, setLoaded] = useState(carried);
  const narrow = useMedia("(max-width: 760px)");
  if (!loaded) return <Empty onLoaded={setLoaded} progress={progress} />;
  if (loaded.head.kind === "compare") return <Compare loaded={loaded} narrow={narrow} />;
  return <Explorer key={loaded.head.names[0]} loaded={loaded} narrow={narrow} onOther={carried ? null : () => setLoaded(null)} />;
}

const SIZES = [0, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9];

/** The filter and view in the address, if it has more than a section's name. */
function fromHere(): { filter: Filter; view: View } {
  return fromAddress(anchor().includes("=") ? anchor() : "");
}

function Explorer({ loaded, narrow, onOther }: { loaded: Loaded; narrow: boolean; onOther: (() => void) | null }) {
  const { head, traces } = loaded;
  const [which, setWhich] = useState(0);
  const trace = traces[which]!;
  const start = useMemo(fromHere, []);
  const [filter, setFilter] = useState(start.filter);
  const [view, setView] = useState(start.view);
  const [chosen, setChosen] = useState<Chosen | null>(null);
  const colours = useMemo(() => groupColours(trace), [trace]);
  // The reader asked for one of several similar modules: folding would hide it.
  const folded = view.folded && !words.pattern(filter.module).includes("#");
  const tree = useMemo(() => new Tree(trace, folded), [trace, folded]);
  const events = useMemo(() => matching(trace, filter), [trace, filter]);
  const counted = useMemo(() => {
    tree.count(trace, events, opKindsShown(trace, filter, view.noise), !isActive(filter));
    return {};
  }, [tree, trace, events, filter, view.noise]);
  const [open, setOpen] = useState<ReadonlySet<string>>(() => firstOpen(tree, filter));

  // A layout effect, so that the address is right as soon as the page is: the reader may reload at once.
  useLayoutEffect(() => {
    // Only after the reader changes something: a link to a section stays as it is.
    const address = toAddress(filter, view);
    try {
      if (address || anchor().includes("=")) setAnchor(address, false);
    } catch {
      // a frame without an address of its own, in a notebook's cell
    }
  }, [filter, view]);
  useEffect(() => {
    const follow = () => {
      if (!anchor().includes("=")) return;
      const next = fromHere();
      if (toAddress(next.filter, next.view) === toAddress(filter, view)) return;
      setFilter(next.filter);
      setView(next.view);
      setOpen((before) => new Set([...before, ...firstOpen(tree, next.filter)]));
    };
    addEventListener("hashchange", follow);
    addEventListener("popstate", follow);
    return () => {
      removeEventListener("hashchange", follow);
      removeEventListener("popstate", follow);
    };
  }, [filter, view, tree]);
  // A link to one collective opens it.
  useEffect(() => {
    if (view.collective === null) return;
    const event = trace.events.find((each) => each.sequence === view.collective);
    if (event && !(chosen?.kind === "collective" && chosen.event === event)) setChosen({ kind: "collective", event });
  }, [view.collective, trace]);

  const shell = useRef<HTMLDivElement>(null);
  useEffect(() => {
    const close = (event: KeyboardEvent) => {
      if (event.key === "Escape" && !(event.target instanceof HTMLInputElement)) choose(null);
    };
    addEventListener("keydown", close);
    return () => removeEventListener("keydown", close);
  }, []);

  function choose(next: Chosen | null) {
    setChosen(next);
    setView((before) => ({ ...before, collective: next?.kind === "collective" ? next.event.sequence : null }));
  }
  function chooseRow(row: TreeRow) {
    if (row.kind === "module") choose({ kind: "module", row: row.row });
    else if (row.kind === "collective") choose({ kind: "collective", event: row.event });
    else if (row.kind === "op") choose({ kind: "op", op: row.op });
    else if (row.kind === "pass") setOpen((before) => toggled(before, row.key));
  }
  function showModule(path: string) {
    setFilter((before) => ({ ...before, module: path }));
    setOpen((before) => new Set([...before, ...above(path, tree), ...path.split(".").map((_, end, parts) => parts.slice(0, end + 1).join("."))]));
  }
  const chosenEvent = chosen?.kind === "collective" ? chosen.event.index : null;
  const sections = [
    ["modules", "Modules"], ["bytes", trace.bytesKnown ? "Bytes" : "Shares"], ["sequence", "Sequence"], ["why", "Why"],
    ...(trace.modules.some((module) => module.parameters.length) ? [["parameters", "Parameters"] as const] : []),
  ] as const;
  return (
    <div ref={shell} class={`explorer ${chosen ? "with-details" : ""}`}>
      <Shell
        title="commlens trace"
        sections={sections}
        tools={onOther ? <button type="button" class="button" onClick={onOther}>Another file</button> : undefined}
      >
        <h1>{answer(trace)}</h1>
        {timeAnswer(trace) && <p class="dim">{timeAnswer(trace)}</p>}
        <Ranks {...{ loaded, which }} onWhich={(next) => { setWhich(next); choose(null); }} />
        <p class="dim">
          {head.names[which]}{trace.script && <>, of <span class="mono">{trace.script}</span></>}{trace.torch && `, torch ${trace.torch}`}{hasTime(trace) && trace.estimate ? `. Times are estimated for ${trace.estimate.network}` : ""}. {selfCheck(trace)}
        </p>
        {[...head.notes, ...trace.coverage.blind].map((note) => <p key={note} class="note">{note}</p>)}
        <Facets {...{ trace, filter, colours }} onChange={setFilter} />
        <div class="filter-bar">
          <Search
            value={filter.text}
            onInput={(text) => setFilter({ ...filter, text })}
            label="Search modules, ops, lines"
            found={isActive(filter) ? `${number(sum(trace, events))} of ${count(trace.calls, "collective")}` : ""}
          />
          {trace.bytesKnown && (
            <label class="choice">
              at least <select value={filter.least} onChange={(event) => setFilter({ ...filter, least: Number(event.currentTarget.value) })}>
                {[...new Set([...SIZES, filter.least])].sort((a, b) => a - b).map((least) => <option key={least} value={least}>{least ? size(least) : "any size"}</option>)}
              </select>
            </label>
          )}
          <Chips filter={filter} onChange={setFilter} />
        </div>
        <Modules
          {...{ trace, tree, counted, open, colours, narrow }}
          onOpen={setOpen}
          noise={view.noise}
          onNoise={(noise) => setView({ ...view, noise })}
          folded={folded}
          onFold={(folded) => setView({ ...view, folded })}
          chosen={chosen?.kind === "module" ? chosen.row.path : null}
          onChoose={chooseRow}
        />
        <Bytes {...{ trace, tree, counted, colours }} onChoose={(row) => choose({ kind: "module", row })} />
        <Sequence {...{ trace, events, colours, narrow }} chosen={chosenEvent} onChoose={(event) => choose({ kind: "collective", event })} />
        <Why {...{ trace, events, narrow }} chosen={chosen?.kind === "reason" ? chosen.reason.key : null} onChoose={(reason) => choose({ kind: "reason", reason })} />
        {trace.modules.some((module) => module.parameters.length) && <Parameters {...{ trace, tree, filter, narrow }} />}
      </Shell>
      {chosen && (
        <Details
          {...{ trace, chosen }}
          onClose={() => choose(null)}
          onChoose={choose}
          onModule={showModule}
          onSource={(source) => setFilter({ ...filter, source })}
        />
      )}
    </div>
  );
}

/** The roots and their children, or the path to the wanted module. */
function firstOpen(tree: Tree, filter: Filter): Set<string> {
  const found = new Set(tree.roots.filter((row) => row.path).map((row) => row.path));
  if (filter.module) {
    const row = tree.find(filter.module);
    if (row) for (const path of above(row.path, tree)) found.add(path);
  } else if (tree.rows.length < 40) for (const row of tree.rows) if (row.children.length) found.add(row.path);
  return found;
}

function above(path: string, tree: Tree): string[] {
  const found: string[] = [];
  for (let row = tree.find(path) ?? null; row; row = row.parent) found.push(row.path);
  return found;
}

function toggled(open: ReadonlySet<string>, key: string): Set<string> {
  const next = new Set(open);
  if (!next.delete(key)) next.add(key);
  return next;
}

function sum(trace: Trace, events: readonly number[]): number {
  return events.reduce((total, index) => total + trace.events[index]!.count, 0);
}

/** What the collectives took, and what the rank waited; empty if no time is known. */
function timeAnswer(trace: Trace): string {
  if (!trace.durationsKnown || trace.estimate) return "";
  let [timed, time, waited] = [0, 0, 0];
  for (const event of trace.events) {
    const took = trace.timeOf(event);
    if (!took) continue;
    timed += 1;
    time += took;
    waited += trace.waitedOf(event) ?? 0;
  }
  const which = timed === trace.calls ? "They" : `${number(timed)} of them, whose time is known,`;
  return `${which} took ${seconds(time / 1e9)}${waited ? `; the rank waited for ${seconds(waited / 1e9)} of it (${Math.round((100 * waited) / time)}%)` : ""}.`;
}

function answer(trace: Trace): string {
  const some = count(trace.calls, "collective");
  if (!trace.groupsKnown) return `${some}, by CommDebugMode's count.`;
  const who = `rank ${trace.rank} of ${number(trace.worldSize)}${trace.preview ? ", a preview" : ""}`;
  const setup = trace.events.filter((event) => trace.isSetup(event));
  const [calls, bytes] = [setup.reduce((total, event) => total + event.count, 0), setup.reduce((total, event) => total + event.wireBytes * event.count, 0)];
  const before = calls ? ` and the setup before them (${count(calls, "collective")} and ${size(bytes)})` : "";
  const over = trace.steps ? `, over ${count(trace.steps, "optimizer step")}${before}` : "";
  return `${some}${trace.bytesKnown ? `, ${size(trace.wireBytes)} on the wire` : ""}${over}, ${who}${estimatedTime(trace, setup)}.`;
}

/** The estimated time of a step, and that of the setup before the first one; empty without an estimate. */
function estimatedTime(trace: Trace, setup: readonly Collective[]): string {
  if (!hasTime(trace) || !trace.estimate) return "";
  const took = (events: readonly Collective[]) => events.reduce((total, event) => total + trace.timeOf(event), 0) / 1e9;
  const [inSetup, inAll] = [took(setup), took(trace.events)];
  const ofStep = trace.steps ? `${seconds((inAll - inSetup) / trace.steps)} per step` : seconds(inAll - inSetup);
  return `, ${ofStep}${setup.length ? ` and ${seconds(inSetup)} in the setup` : ""} if none are hidden`;
}

function selfCheck(trace: Trace): string {
  const { dispatched, recorded, unclassified } = trace.coverage;
  if (!trace.groupsKnown) return "CommDebugMode's JSON has no self-check.";
  const whole = `${dispatched === recorded ? "All" : `${number(recorded)} of`} ${count(dispatched, "dispatched collective")} are recorded`;
  return unclassified ? `${whole}; ${number(unclassified)} are unclassified.` : `${whole} and classified.`;
}

function Ranks({ loaded, which, onWhich }: { loaded: Loaded; which: number; onWhich: (which: number) => void }) {
  const { ranks } = loaded.head;
  if (!ranks) return null;
  return (
    <div class={ranks.differences.length ? "note ranks" : "ranks"}>
      <p><b>{ranks.answer}</b></p>
      {ranks.differences.length > 0 && <ul>{ranks.differences.map((text) => <li key={text}>{text}</li>)}</ul>}
      {loaded.traces.length > 1 && (
        <label class="choice">
          Shown: <select value={which} onChange={(event) => onWhich(Number(event.currentTarget.value))}>
            {ranks.classes.map((name, index) => <option key={index} value={index}>{name}</option>)}
          </select>
        </label>
      )}
    </div>
  );
}

function Chips({ filter, onChange }: { filter: Filter; onChange: (filter: Filter) => void }) {
  const without = <V,>(values: ReadonlySet<V>, value: V) => new Set([...values].filter((each) => each !== value));
  const chips: [string, Filter][] = [
    ...[...filter.groups].map((group): [string, Filter] => [`on ${group}`, { ...filter, groups: without(filter.groups, group) }]),
    ...[...filter.phases].map((phase): [string, Filter] => [words.phase(phase), { ...filter, phases: without(filter.phases, phase) }]),
    ...[...filter.ops].map((op): [string, Filter] => [op, { ...filter, ops: without(filter.ops, op) }]),
    ...(filter.module ? [[`in ${filter.module}`, { ...filter, module: "" }] as [string, Filter]] : []),
    ...(filter.source ? [[`at ${filter.source}`, { ...filter, source: "" }] as [string, Filter]] : []),
    ...(filter.least ? [[`from ${size(filter.least)}`, { ...filter, least: 0 }] as [string, Filter]] : []),
  ];
  return (
    <>
      {chips.map(([name, next]) => (
        <button key={name} type="button" class="chip" aria-label={`Remove the filter ${name}`} onClick={() => onChange(next)}>{name} <span aria-hidden="true">×</span></button>
      ))}
      {isActive(filter) && <button type="button" class="button" onClick={() => onChange(EVERYTHING)}>Show all</button>}
    </>
  );
}

