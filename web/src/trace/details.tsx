import type { ComponentChildren } from "preact";
import { CopyButton } from "../shared/copy";
import { Icon } from "../shared/icons";
import { capital, count, formatRanks, number, seconds, size } from "../shared/words";
import { overlapping } from "./lanes";
import { type Collective, PHASES, type Trace } from "./model";
import { opInputs, typeOf } from "./modules";
import { parameterShape } from "./parameters";
import { type Reason, reasons } from "./reasons";
import { type ModuleRow, type Tally, parametersOf, talliesOf } from "./tree";
import * as words from "./words";

/** The selected item. */
export type Chosen =
  | { kind: "collective"; event: Collective }
  | { kind: "module"; row: ModuleRow }
  | { kind: "reason"; reason: Reason }
  | { kind: "op"; op: number };

interface DetailsProps {
  trace: Trace;
  chosen: Chosen;
  onClose: () => void;
  onChoose: (chosen: Chosen) => void;
  onModule: (path: string) => void;
  onSource: (source: string) => void;
}

/** All details of the selected item, beside the rest of the page. */
export function Details(props: DetailsProps) {
  const { chosen, onClose } = props;
  return (
    <aside class="details" aria-label="Details">
      <button type="button" class="icon-button close" aria-label="Close the details" onClick={onClose}><Icon name="close" /></button>
      {chosen.kind === "collective" && <OneCollective {...props} event={chosen.event} />}
      {chosen.kind === "module" && <OneModule {...props} row={chosen.row} />}
      {chosen.kind === "reason" && <OneReason {...props} reason={chosen.reason} />}
      {chosen.kind === "op" && <OneOp {...props} op={chosen.op} />}
    </aside>
  );
}

const MOST = 40;

function OneCollective({ trace, event, onChoose, onModule, onSource }: DetailsProps & { event: Collective }) {
  const group = trace.groupOf(event);
  const { owner, cause, source } = event;
  const overlap = overlapping(trace, event, 12);
  const before = opBefore(trace, event);
  return (
    <>
      <h2>{words.title(trace, event)}</h2>
      <p>{sentenceOf(event)}</p>
      <dl>
        <Fact name="Module">{event.site === null ? "none" : <Link onClick={() => onModule(event.site!)}>{event.site}</Link>}{event.call > 1 ? `, call ${number(event.call)}` : ""}{event.microbatch === null ? "" : `, microbatch ${number(event.microbatch)}`}</Fact>
        <Fact name="Phase">{event.site === null ? words.phase(event.phase) : words.phaseWithin(event.phase)}{trace.steps > 1 ? `, step ${event.step === event.lastStep ? event.step : `${event.step} to ${event.lastStep}`}` : ""}</Fact>
        {cause && (
          <Fact name="Redistribution">
            <span class="mono change"><span>{words.placements(cause.before)}</span> <span aria-label="to">→</span> <span>{words.placements(cause.after)}</span></span>
            <br />
            {cause.implicit ? `DTensor chose it${cause.op ? ` to run ${cause.op}` : ""}.` : `The program or its parallel plan requested it${cause.op ? `; ${cause.op} needed it` : ""}.`}
            {cause.mesh && <><br /><span class="dim mono">{cause.mesh}</span></>}
          </Fact>
        )}
        {before && <Fact name="Op"><Link onClick={() => onChoose({ kind: "op", op: before.op })}>{before.name}</Link> <span class="mono dim">{before.inputs}</span></Fact>}
        {owner && <Fact name="Parameters of">{owner.library} {owner.name}{owner.parameters.length > 0 && <Listed items={owner.parameters} />}</Fact>}
        {source && (
          <Fact name="Line">
            <Link onClick={() => onSource(words.where(source))}>{words.where(source)}</Link> in {source.function || "?"}{event.through ? `, through ${event.through}` : ""}
            <br /><span class="dim mono path">{source.file}:{source.line}</span>
          </Fact>
        )}
        {!source && event.through && <Fact name="Called through">{event.through}</Fact>}
        {trace.groupsKnown && <Fact name="Group">{words.onGroup(group)}{group.description && group.description !== group.label ? `, ${group.description}` : ""}{group.backend ? `, ${group.backend}` : ""}, {count(group.ranks.length, "rank")}</Fact>}
        {trace.bytesKnown && (
          <Fact name="Bytes">
            {size(event.inputBytes)} in, {size(event.outputBytes)} out, {size(event.wireBytes)} on the wire{event.dtype ? `, ${event.dtype}` : ""}{event.reduceOp ? `, ${event.reduceOp}` : ""}
            {event.count > 1 ? `, each; ${number(event.count)} of them` : ""}
          </Fact>
        )}
        {event.root !== null && <Fact name="Root">rank {event.root}</Fact>}
        {event.peer !== null && <Fact name="Peer">rank {event.peer}{event.tag ? `, tag ${event.tag}` : ""}</Fact>}
        <Fact name="Call">{event.api}{event.asynchronous === null ? "" : event.asynchronous ? ", asynchronous" : ", synchronous"}{event.members ? `, joins ${event.members} ops` : ""}{event.thread ? `, on thread ${event.thread}` : ""}</Fact>
        {trace.timesKnown && event.returned > 0 && (
          <Fact name="Time">
            issued {seconds((event.started - trace.firstStarted) / 1e9)} after the first collective, {seconds((event.returned - event.started) / 1e9)} in the call
            {event.waitEnded ? `, waited for ${seconds((event.waitEnded - event.waitBegan) / 1e9)}${event.waitBegan > event.returned ? `, ${seconds((event.waitBegan - event.returned) / 1e9)} after it returned` : ""}` : "; no wait was recorded"}
          </Fact>
        )}
        {event.duration > 0 && (
          <Fact name="Took">
            {seconds(event.duration / 1e9)}{event.overlapped === null ? "" : `, ${seconds(event.overlapped / 1e9)} of it while other work ran`}
          </Fact>
        )}
        {trace.estimate && <Fact name="Estimate">{seconds(trace.timeOf(event) / 1e9)} on {trace.estimate.network}</Fact>}
        {trace.timesKnown && event.returned > 0 && (
          <Fact name="Overlaps">
            {overlap.all === 0 ? "no other collective was in flight" : overlap.found.map((other) => (
              <span key={other.index}><Link onClick={() => onChoose({ kind: "collective", event: other })}>{words.title(trace, other)}</Link>{" "}</span>
            ))}
            {overlap.all > overlap.found.length && `and ${number(overlap.all - overlap.found.length)} more`}
          </Fact>
        )}
      </dl>
      <p class="buttons">
        <CopyButton label="Copy as text" text={() => asText(trace, event)} />
        {([["Previous", -1], ["Next", 1]] as const).map(([name, by]) => (
          <button key={name} type="button" class="button" disabled={!trace.events[event.index + by]} onClick={() => onChoose({ kind: "collective", event: trace.events[event.index + by]! })}>{name}</button>
        ))}
      </p>
    </>
  );
}

function sentenceOf(event: Collective): string {
  const why = words.why(event);
  const line = words.sourceWords(event);
  return `${capital(words.place(event.phase, event.site))}${why ? `, ${why}` : ""}${line ? `, at ${line}` : ""}.`;
}

function asText(trace: Trace, event: Collective): string {
  return [
    `${words.title(trace, event)} [${formatRanks(trace.groupOf(event).ranks)}]`,
    sentenceOf(event),
    trace.bytesKnown ? `${event.dtype} ${size(event.inputBytes)} in, ${size(event.outputBytes)} out, ${size(event.wireBytes)} on the wire` : "",
    event.source ? `${event.source.file}:${event.source.line} in ${event.source.function}` : "",
  ].filter(Boolean).join("\n");
}

/** The DTensor op that needed the redistribution: the last op of that name and place before the collective. */
function opBefore(trace: Trace, event: Collective): { op: number; name: string; inputs: string } | null {
  const wanted = event.cause?.op;
  if (!wanted) return null;
  // Ops are in order; those just before the collective have its number or a lower one.
  let [low, high] = [0, trace.opBefore.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (trace.opBefore[middle]! <= event.sequence) low = middle + 1;
    else high = middle;
  }
  for (let op = low - 1; op >= Math.max(0, low - 500); op--) {
    const kind = trace.opKinds[trace.opKind[op]!]!;
    if (kind.name.startsWith(wanted) && kind.placements.length && kind.site === event.site) return { op, name: kind.name, inputs: opInputs(kind) };
  }
  return null;
}

function OneOp({ trace, op, onModule, onChoose }: DetailsProps & { op: number }) {
  const kind = trace.opKinds[trace.opKind[op]!]!;
  const before = trace.opBefore[op]!;
  // The redistribution that it needed was issued right after it.
  const caused = trace.events.filter((event) => event.sequence >= before && event.sequence < before + 16 && event.site === kind.site && event.cause?.op && kind.name.startsWith(event.cause.op));
  const next = trace.events.find((event) => before > 0 && event.sequence >= before);
  return (
    <>
      <h2>{kind.name}</h2>
      <p>{capital(words.place(kind.phase, kind.site))}{kind.placements.length ? ", on DTensors." : ", on plain tensors."}</p>
      <dl>
        <Fact name="Module">{kind.site === null ? "none" : <Link onClick={() => onModule(kind.site!)}>{kind.site}</Link>}</Fact>
        <Fact name="Inputs">
          <table class="inputs"><tbody>
            {Array.from({ length: Math.max(kind.shapes.length, kind.placements.length) }, (_, index) => {
              const placement = kind.placements[index] === undefined ? "" : words.placements(kind.placements[index]);
              return (
                <tr key={index}>
                  <td class="mono">{kind.shapes[index] ?? ""}</td>
                  <td class="mono">{placement}</td>
                  <td class="mono">{caused.filter((event) => words.placements(event.cause!.before) === placement).slice(0, 1).map((event) => <span key={event.index}>→ {words.placements(event.cause!.after)}</span>)}</td>
                </tr>
              );
            })}
          </tbody></table>
        </Fact>
        {kind.mesh && <Fact name="Mesh"><span class="mono">{kind.mesh}</span></Fact>}
        <Fact name="Caused">
          {caused.length === 0 ? "no collective" : caused.map((event) => (
            <span key={event.index}><Link onClick={() => onChoose({ kind: "collective", event })}>{words.title(trace, event)}</Link> {words.change(event.cause!)}<br /></span>
          ))}
        </Fact>
        {next && <Fact name="Before"><Link onClick={() => onChoose({ kind: "collective", event: next })}>{words.title(trace, next)}</Link></Fact>}
      </dl>
    </>
  );
}

function OneModule({ trace, row, onModule, onChoose }: DetailsProps & { row: ModuleRow }) {
  const wanted = new Set(row.members);
  const modules = new Map(trace.modules.filter((module) => wanted.has(module.path)).map((module) => [module.path, module]));
  const others = [...modules.values()].flatMap((module) => module.otherPaths);
  const ran = [...modules.values()].reduce((sum, module) => sum + module.calls, 0);
  const parameters = parametersOf(row, modules);
  const inside = below(row);
  const why = reasons(trace, inside, "reason");
  return (
    <>
      <h2>{row.path || "Outside all modules"}</h2>
      <p class="dim">{[typeOf(row.members, trace), row.members.length > 1 ? count(row.members.length, "module") : "", ran ? `called ${count(ran, "time")}` : ""].filter(Boolean).join(", ")}</p>
      {others.length > 0 && <p class="dim">Shared: also <span class="mono">{others.join(", ")}</span></p>}
      {row.path && <p class="buttons"><button type="button" class="button" onClick={() => onModule(row.path)}>Show only this module</button></p>}
      <h3>Including children</h3>
      <table class="figures">
        <thead><tr><th>Phase</th><th>Collective</th><th class="numeric">Calls</th>{trace.bytesKnown && <th class="numeric">On the wire</th>}</tr></thead>
        <tbody>
          {PHASES.flatMap((name, phase) => [...talliesOf(trace, inside.filter((index) => trace.events[index]!.phase === phase)).values()].map(({ op, group, tally }, index) => (
            <tr key={`${phase} ${op} ${group}`}>
              <td>{index === 0 ? name : ""}</td>
              <td class="mono">{words.opOn(trace, op, group)}</td>
              <td class="numeric">{number(tally.calls)}</td>
              {trace.bytesKnown && <td class="numeric">{size(tally.bytes)}</td>}
            </tr>
          )))}
        </tbody>
      </table>
      {why.length > 0 && <h3>Why</h3>}
      <ul class="plain-list">
        {why.slice(0, 8).map((reason) => (
          <li key={reason.key}><Link onClick={() => onChoose({ kind: "reason", reason })}>{reason.sentence}</Link>{trace.bytesKnown && <span class="dim"> {size(reason.tally.bytes)}</span>}</li>
        ))}
      </ul>
      {parameters.length > 0 && <h3>Parameters</h3>}
      <ul class="plain-list mono">
        {parameters.slice(0, MOST).map(({ parameter, times }, index) => (
          <li key={index}>{parameter.name}{times > 1 ? ` × ${times}` : ""} <span class="placement">{words.placements(parameter.placements) || "not a DTensor"}</span> <span class="dim">{parameterShape(parameter)}{parameter.localBytes === null ? "" : `, ${size(parameter.localBytes)} on this rank`}</span></li>
        ))}
      </ul>
    </>
  );
}

function below(row: ModuleRow): number[] {
  const within = (each: ModuleRow): number[][] => [each.events, ...each.children.flatMap(within)];
  return within(row).flat().sort((a, b) => a - b);
}

function OneReason({ trace, reason, onChoose, onSource }: DetailsProps & { reason: Reason }) {
  const events = reason.events.map((index) => trace.events[index]!);
  const first = events[0]!;
  return (
    <>
      <h2>Why</h2>
      <p>{reason.sentence}.</p>
      <dl>
        <Amount tally={reason.tally} trace={trace} />
        {first.source && <Fact name="Line"><Link onClick={() => onSource(words.where(first.source))}>{words.where(first.source)}</Link> in {first.source.function}<br /><span class="dim mono path">{first.source.file}:{first.source.line}</span></Fact>}
        {first.owner && first.owner.parameters.length > 0 && <Fact name="Parameters"><Listed items={[...new Set(events.slice(0, 200).flatMap((event) => event.owner?.parameters ?? []))]} /></Fact>}
      </dl>
      <h3>{count(events.length, "collective")}</h3>
      <ul class="plain-list">
        {events.slice(0, MOST).map((event) => (
          <li key={event.index}><Link onClick={() => onChoose({ kind: "collective", event })}>{words.title(trace, event)}</Link> <span class="dim">{words.place(event.phase, event.site)}</span></li>
        ))}
        {events.length > MOST && <li class="dim">and {number(events.length - MOST)} more</li>}
      </ul>
    </>
  );
}

function Amount({ tally, trace }: { tally: Tally; trace: Trace }) {
  return <Fact name="In all">{count(tally.calls, "call")}{trace.bytesKnown ? `, ${size(tally.bytes)} on the wire` : ""}{tally.ns ? `, ${seconds(tally.ns / 1e9)}${trace.estimate ? " estimated" : ""}` : ""}</Fact>;
}

function Fact({ name, children }: { name: string; children: ComponentChildren }) {
  return <div class="fact"><dt>{name}</dt><dd>{children}</dd></div>;
}

function Link({ onClick, children }: { onClick: () => void; children: ComponentChildren }) {
  return <button type="button" class="as-link" onClick={onClick}>{children}</button>;
}

function Listed({ items }: { items: readonly string[] }) {
  return (
    <details>
      <summary>{count(items.length, "parameter")}</summary>
      <ul class="plain-list mono">{items.slice(0, 200).map((item) => <li key={item}>{item}</li>)}</ul>
    </details>
  );
}
