import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { Breakable } from "../shared/breakable";
import { Section } from "../shared/page";
import { colour, onThemeChange } from "../shared/theme";
import { count, number, seconds, size } from "../shared/words";
import { Clipped, type Column, Grid } from "./grid";
import type { Collective, Trace } from "./model";
import { type Fold, type Lane, type Span, foldLanes, folded, idleTimes, lanesByOrder, lanesByTime } from "./lanes";
import * as words from "./words";

interface SequenceProps {
  trace: Trace;
  events: readonly number[];
  colours: ReadonlyMap<string, string>;
  narrow: boolean;
  chosen: number | null;
  onChoose: (event: Collective) => void;
}

const LANE = 22;
const AXIS = 20;
const GUTTER = 132;

/** The order, timing and overlap of collectives, as a drawing and as a list. */
export function Sequence({ trace, events, colours, narrow, chosen, onChoose }: SequenceProps) {
  const [byTime, setByTime] = useState(trace.timesKnown);
  const timed = byTime && trace.timesKnown;
  const rows = useMemo(() => events.map((index) => trace.events[index]!), [trace, events]);
  const sizes: Column<Collective>[] = trace.bytesKnown ? [
    { id: "bytes", name: narrow ? "Bytes" : "On the wire", width: narrow ? "minmax(5.4rem, 1fr)" : "5.4rem", numeric: true, cell: (event) => size(event.wireBytes * event.count) },
  ] : [];
  const columns: Column<Collective>[] = [
    ...(narrow ? [] : [{ id: "number", name: "#", width: "3.6rem", cell: (event: Collective) => number(event.sequence) }]),
    ...(trace.steps > 1 && !narrow ? [{ id: "step", name: "Step", width: "3.5rem", numeric: true, cell: (event: Collective) => (event.lastStep === event.step ? event.step : `${event.step}-${event.lastStep}`) }] : []),
    {
      id: "op", name: narrow ? "Collective and where" : "Collective", width: "minmax(10.5rem, 0.8fr)",
      cell: (event) => <span class="clip">{narrow && `#${number(event.sequence)} `}<span class="swatch" style={{ background: `var(${colours.get(trace.groupOf(event).label) ?? "--idle"})` }} /><span class="mono">{event.op}</span> {event.count > 1 && <span class="dim">× {number(event.count)}</span>} {trace.groupsKnown && <span class="dim">{trace.groupOf(event).label}</span>}{narrow && <>, {where(event)}</>}</span>,
    },
    ...(narrow ? [] : [{ id: "where", name: "Where", width: "minmax(12rem, 1.7fr)", cell: (event: Collective) => <span class="clip" title={event.site ?? undefined}>{where(event)}</span> }]),
    ...(narrow ? [] : [{ id: "why", name: "Why", width: "minmax(12rem, 2.4fr)", cell: (event: Collective) => <Clipped text={words.why(event)} line={[words.why(event) && ", ", words.sourceWords(event)].join("")} dim /> }]),
    ...sizes,
    ...(trace.timesKnown ? [
      { id: "call", name: "In call", width: narrow ? "minmax(4.8rem, 1fr)" : "4.8rem", numeric: true, cell: (event: Collective) => (event.returned ? seconds((event.returned - event.started) / 1e9) : "") },
      { id: "wait", name: "Waited", width: narrow ? "minmax(4.8rem, 1fr)" : "4.8rem", numeric: true, cell: (event: Collective) => (event.waitEnded ? seconds((event.waitEnded - event.waitBegan) / 1e9) : "") },
    ] : []),
  ];
  return (
    <Section
      id="sequence"
      title="Sequence"
      about={
        !trace.groupsKnown
          ? "Grouped by module: CommDebugMode's JSON has no order."
          : timed
          ? "The issues and waits of each thread, and the collectives in flight on each group, from the issue to the end of the wait. Stacked bars of a group overlap in time. Time counts from the first collective; long idle times are drawn narrow."
          : `In order of issue${trace.preview ? "; the times of a preview mean nothing" : ""}. One lane per group.`
      }
      tools={trace.timesKnown ? (
        <span class="buttons" role="group" aria-label="Across">
          <button type="button" class="button" aria-pressed={timed} onClick={() => setByTime(true)}>Time</button>
          <button type="button" class="button" aria-pressed={!timed} onClick={() => setByTime(false)}>Order</button>
        </span>
      ) : undefined}
    >
      {trace.groupsKnown && trace.events.length > 0 && <Drawing {...{ trace, events, colours, chosen, onChoose, timed }} />}
      <Grid
        label="Collectives in order"
        columns={columns}
        rows={rows}
        keyOf={(event) => String(event.index)}
        onChoose={onChoose}
        chosen={chosen === null ? null : String(chosen)}
        most={14}
        stacked={narrow ? 2 : 0}
        wraps={1300}
        empty="No collective matches the filters."
      />
    </Section>
  );
}

function where(event: Collective) {
  if (event.site === null) return words.phase(event.phase);
  return <>{words.phaseWithin(event.phase)} <span class="mono dim"><Breakable text={event.site} /></span></>;
}

interface DrawingProps {
  trace: Trace;
  events: readonly number[];
  colours: ReadonlyMap<string, string>;
  chosen: number | null;
  onChoose: (event: Collective) => void;
  timed: boolean;
}

function Drawing({ trace, events, colours, chosen, onChoose, timed }: DrawingProps) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const [lanes, folds] = useMemo((): [Lane[], Fold[]] => {
    if (!timed) return [lanesByOrder(trace), []];
    const real = lanesByTime(trace);
    const idle = idleTimes(real);
    return [foldLanes(real, idle), idle];
  }, [trace, timed]);
  const whole = useMemo(() => extent(lanes), [lanes]);
  const [view, setView] = useState(whole);
  const [width, setWidth] = useState(0);
  const [theme, setTheme] = useState(0);
  const drag = useRef<{ x: number; view: [number, number]; moved: boolean } | null>(null);
  const shown = useMemo(() => {
    const all = new Uint8Array(trace.events.length);
    for (const index of events) all[index] = 1;
    return all;
  }, [trace, events]);
  useEffect(() => setView(whole), [whole]);
  useEffect(() => onThemeChange(() => setTheme((value) => value + 1)), []);
  useEffect(() => {
    const element = canvas.current!;
    const observer = new ResizeObserver(() => setWidth(element.clientWidth));
    observer.observe(element);
    setWidth(element.clientWidth);
    return () => observer.disconnect();
  }, []);
  const gutter = useMemo(() => gutterOf(lanes, width), [lanes, width]);
  const rows = lanes.reduce((sum, lane) => sum + lane.rows, 0);
  const height = rows * LANE + AXIS;
  // Scroll to a collective selected elsewhere.
  useEffect(() => {
    if (chosen === null) return;
    for (const lane of lanes) {
      const span = lane.spans.find((each) => each.event === chosen);
      if (span && (span.end < view[0] || span.start > view[1])) {
        const half = (view[1] - view[0]) / 2;
        setView(within([span.start - half, span.start + half], whole));
        return;
      }
    }
  }, [chosen, lanes]);
  useEffect(() => {
    const element = canvas.current;
    if (!element || !width) return;
    const frame = requestAnimationFrame(() => paint(element, width, height, gutter, lanes, folds, view, shown, chosen, colours, trace, timed));
    return () => cancelAnimationFrame(frame);
  }, [width, height, lanes, view, shown, chosen, colours, theme]);

  const scale = (view[1] - view[0]) / Math.max(1, width - gutter);
  function zoom(factor: number, at = (view[0] + view[1]) / 2) {
    const least = timed ? 200 : 4;
    const wide = Math.max(least, Math.min(whole[1] - whole[0], (view[1] - view[0]) * factor));
    const share = (at - view[0]) / (view[1] - view[0]);
    setView(within([at - share * wide, at + (1 - share) * wide], whole));
  }
  function pan(by: number) {
    setView(within([view[0] + by, view[1] + by], whole));
  }
  function at(event: MouseEvent): number {
    return view[0] + (event.offsetX - gutter) * scale;
  }
  function pick(event: MouseEvent) {
    let row = Math.floor((event.offsetY - AXIS) / LANE);
    for (const lane of lanes) {
      if (row < lane.rows) {
        const near = 3 * scale;
        const where = at(event);
        let [found, distance] = [null as Span | null, Infinity];
        for (const span of lane.spans) {
          if (span.event < 0 || span.row !== row) continue;
          const far = where < span.start ? span.start - where : where > span.end ? where - span.end : 0;
          if (far < distance) [found, distance] = [span, far];
        }
        if (found && distance <= near) onChoose(trace.events[found.event]!);
        return;
      }
      row -= lane.rows;
    }
  }
  function wheel(event: WheelEvent) {
    if (!event.ctrlKey && !event.metaKey && Math.abs(event.deltaX) <= Math.abs(event.deltaY)) return; // the page scrolls
    event.preventDefault();
    if (event.ctrlKey || event.metaKey) zoom(Math.exp(event.deltaY / 300), at(event));
    else pan(event.deltaX * scale);
  }
  function keys(event: KeyboardEvent) {
    const place = chosen === null ? -1 : events.indexOf(chosen);
    if (event.key === "+" || event.key === "=") zoom(0.5);
    else if (event.key === "-") zoom(2);
    else if (event.key === "0") setView(whole);
    else if (event.key === "ArrowRight" || event.key === "ArrowLeft") {
      const next = events[place < 0 ? 0 : place + (event.key === "ArrowRight" ? 1 : -1)];
      if (next !== undefined) onChoose(trace.events[next]!);
    } else return;
    event.preventDefault();
  }
  return (
    <div class="drawing">
      <div class="controls">
        <span class="buttons">
          <button type="button" class="button" onClick={() => zoom(0.5)}>Zoom in</button>
          <button type="button" class="button" onClick={() => zoom(2)}>Zoom out</button>
          <button type="button" class="button" onClick={() => setView(whole)}>All</button>
        </span>
        <span class="dim hint">Drag to move, Ctrl and the wheel to zoom, arrow keys to select the next or previous collective.</span>
      </div>
      <canvas
        ref={canvas}
        tabIndex={0}
        role="img"
        aria-label={`${count(events.length, "collective")} ${timed ? "over time" : "in order of issue"}, ${count(lanes.length, "lane")}: ${lanes.map((lane) => lane.name).join(", ")}. The list below has the same content.`}
        style={{ height: `${height}px` }}
        onKeyDown={keys}
        onWheel={wheel}
        onPointerDown={(event) => {
          drag.current = { x: event.clientX, view, moved: false };
          if (event.pointerType === "mouse") event.currentTarget.setPointerCapture(event.pointerId);
        }}
        onPointerMove={(event) => {
          const from = drag.current;
          if (!from) return;
          const by = event.clientX - from.x;
          if (Math.abs(by) > 3) from.moved = true;
          if (from.moved) setView(within([from.view[0] - by * scale, from.view[1] - by * scale], whole));
        }}
        onPointerUp={(event) => {
          if (drag.current && !drag.current.moved) pick(event);
          drag.current = null;
        }}
        onPointerCancel={() => {
          drag.current = null;
        }}
      />
    </div>
  );
}

function extent(lanes: readonly Lane[]): [number, number] {
  let [low, high] = [Infinity, -Infinity];
  for (const lane of lanes) {
    for (const span of lane.spans) {
      if (span.start < low) low = span.start;
      if (span.end > high) high = span.end;
    }
  }
  return low < high ? [low, high] : [0, 1];
}

function within(view: [number, number], whole: [number, number]): [number, number] {
  const wide = Math.min(view[1] - view[0], whole[1] - whole[0]);
  const start = Math.max(whole[0], Math.min(view[0], whole[1] - wide));
  return [start, start + wide];
}

function paint(
  element: HTMLCanvasElement, width: number, height: number, gutter: number, lanes: readonly Lane[], folds: readonly Fold[], view: [number, number],
  shown: Uint8Array, chosen: number | null, colours: ReadonlyMap<string, string>, trace: Trace, timed: boolean,
): void {
  const ratio = devicePixelRatio || 1;
  element.width = Math.round(width * ratio);
  element.height = Math.round(height * ratio);
  const context = element.getContext("2d");
  if (!context) return;
  context.scale(ratio, ratio);
  const [text, dim, line, idle, page, focus] = ["--text", "--dim", "--line", "--idle", "--page", "--focus"].map(colour) as [string, string, string, string, string, string];
  const palette = new Map([...colours].map(([label, name]) => [label, colour(name)]));
  context.font = font();
  context.textBaseline = "middle";
  const scale = (width - gutter) / (view[1] - view[0]);
  const x = (value: number) => gutter + (value - view[0]) * scale;
  if (timed) timeAxis(context, width, gutter, height, extent(lanes)[0], folds, view, scale, dim, line);
  else orderAxis(context, width, gutter, height, view, scale, trace, dim, line);
  let top = AXIS;
  for (const lane of lanes) {
    context.fillStyle = text;
    context.fillText(clipped(context, lane.name, gutter - 8), 0, top + LANE / 2);
    context.fillStyle = line;
    context.fillRect(0, top + lane.rows * LANE - 1, width, 1);
    context.save();
    context.beginPath();
    context.rect(gutter, top, width - gutter, lane.rows * LANE);
    context.clip();
    const painted = new Float64Array(lane.rows).fill(-1); // end of each row's last bar: skip bars that would be hidden
    const dimmed = new Float64Array(lane.rows).fill(-1);
    for (let index = firstIn(lane, view[0]); index < lane.spans.length; index++) {
      const span = lane.spans[index]!;
      if (span.start > view[1]) break;
      const left = x(span.start);
      const right = Math.max(x(span.end) - 0.5, left + 1);
      const seen = span.event < 0 || shown[span.event] === 1;
      const last = seen ? painted : dimmed;
      if (right <= last[span.row]! + 0.5 && span.event !== chosen) continue;
      last[span.row] = right;
      const y = top + span.row * LANE + 2;
      if (span.event < 0) {
        context.fillStyle = span.shade ? line : idle;
        context.globalAlpha = span.shade ? 0.9 : 0.55;
        context.fillRect(left, y, right - left, LANE - 5);
        context.globalAlpha = 1;
      } else {
        context.fillStyle = palette.get(span.colour) ?? idle;
        context.globalAlpha = seen ? (span.faint ? 0.55 : 1) : 0.12;
        context.fillRect(left, y, right - left, LANE - 5);
        context.globalAlpha = 1;
      }
      if (right - left > 26 && seen) {
        context.fillStyle = span.event < 0 || span.faint ? text : page;
        const from = Math.max(left, gutter) + 4;
        inside(context, span.name, from, y + LANE / 2 - 2, Math.min(right, width) - 3);
      }
      if (span.event >= 0 && span.event === chosen) {
        context.strokeStyle = focus;
        context.lineWidth = 2;
        context.strokeRect(left - 1.5, y - 1, right - left + 3, LANE - 3);
      }
    }
    context.restore();
    top += lane.rows * LANE;
  }
}

/** The first span that may reach into the view. Spans are ordered by start; `longest` bounds how far back one can begin. */
function firstIn(lane: Lane, from: number): number {
  let [low, high] = [0, lane.spans.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (lane.spans[middle]!.start < from - lane.longest) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** Draw a text, unless it would be cut. */
function inside(context: CanvasRenderingContext2D, text: string, left: number, middle: number, right: number): void {
  if (left + context.measureText(text).width <= right) context.fillText(text, left, middle);
}

/** The room for the names of the lanes: all of the longest one, if that leaves enough for the drawing. */
function gutterOf(lanes: readonly Lane[], width: number): number {
  const context = document.createElement("canvas").getContext("2d");
  if (!context) return GUTTER;
  context.font = font();
  const longest = Math.max(...lanes.map((lane) => context.measureText(lane.name).width));
  return Math.max(width < 600 ? 0 : GUTTER, Math.min(longest + 10, width * 0.4));
}

function font(): string {
  return `12px ${getComputedStyle(document.body).fontFamily}`;
}

function clipped(context: CanvasRenderingContext2D, text: string, width: number): string {
  if (width < 10) return "";
  if (context.measureText(text).width <= width) return text;
  let end = Math.min(text.length, Math.floor(width / 5));
  while (end > 1 && context.measureText(`${text.slice(0, end)}…`).width > width) end--;
  return end > 1 ? `${text.slice(0, end)}…` : "";
}

function roundStep(scale: number): number {
  const wanted = 90 / scale;
  const power = 10 ** Math.floor(Math.log10(wanted));
  return Math.max(1, [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= wanted)!);
}

function orderAxis(
  context: CanvasRenderingContext2D, width: number, gutter: number, height: number, view: [number, number], scale: number, trace: Trace, dim: string, line: string,
): void {
  const step = roundStep(scale);
  for (let tick = Math.ceil(view[0] / step) * step; tick <= view[1]; tick += step) {
    mark(context, gutter + (tick - view[0]) * scale, `#${trace.events[Math.round(tick)]?.sequence ?? ""}`, width, height, dim, line);
  }
}

/** Times since the first collective, and bands for the idle times that are drawn narrow. */
function timeAxis(
  context: CanvasRenderingContext2D, width: number, gutter: number, height: number, first: number, folds: readonly Fold[], view: [number, number], scale: number, dim: string, line: string,
): void {
  const x = (time: number) => gutter + (folded(time, folds) - view[0]) * scale;
  const step = roundStep(scale);
  const parts = [first, ...folds.flatMap(({ from, to }) => [from, to]), Infinity];
  for (let part = 0; part < parts.length; part += 2) {
    const [from, to] = [parts[part]!, parts[part + 1]!];
    const begin = from + Math.max(0, view[0] - folded(from, folds));
    for (let tick = Math.ceil((begin - first) / step) * step + first; tick <= to && folded(tick, folds) <= view[1]; tick += step) {
      mark(context, x(tick), tick === first ? "0" : seconds((tick - first) / 1e9), Math.min(width, x(to)), height, dim, line);
    }
  }
  for (const { from, to } of folds) {
    const [left, right] = [Math.max(gutter, x(from)), Math.min(width, x(to))];
    if (right <= left) continue;
    context.fillStyle = line;
    context.globalAlpha = 0.5;
    context.fillRect(left, 0, right - left, height);
    context.globalAlpha = 1;
    context.fillStyle = dim;
    inside(context, `${seconds((to - from) / 1e9)} idle`, left + 3, AXIS / 2, right - 3);
  }
}

function mark(context: CanvasRenderingContext2D, at: number, said: string, width: number, height: number, dim: string, line: string): void {
  context.textAlign = "left";
  context.fillStyle = line;
  context.fillRect(at, AXIS - 4, 1, height - AXIS + 4);
  context.fillStyle = dim;
  inside(context, said, at + 3, AXIS / 2, width);
}
