import { scaleLinear, type ScaleLinear } from "d3-scale";
import { select } from "d3-selection";
import { zoom, zoomIdentity, type D3ZoomEvent, type ZoomBehavior, type ZoomTransform } from "d3-zoom";
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { Icon } from "../shared/icons";
import { Section } from "../shared/page";
import { colour, onThemeChange } from "../shared/theme";
import { number, parseRanks, seconds } from "../shared/words";
import type { Lane, Timeline as Data, VerdictPage } from "./data";
import { RankLink, rankName, ranksPhrase } from "./parts";

const GUTTER = 84; // at least
const SERIES = 6;
const CHARACTER = 8; // at most, in pixels, of the axis and of names
const IN_FLIGHT = 1;
const FAILED = 2;
const UNKNOWN = 3;
const FOUND_LATER = 4;

type Scale = ScaleLinear<number, number>;
interface Spot {
  lane: number;
  op: number;
}

/** One lane per rank and a bar per collective, from its issue to its end; a collective in flight is open at the right. */
export function Timeline({ page, selected }: { page: VerdictPage; selected: number | null }) {
  const data = page.timeline;
  const ranks = page.ranks.rank.length;
  if (data.lanes.length === 0) return null;
  const about = `A bar is a collective, from its issue to its end; one that never ended is hatched and open at the right. 0 is the moment at which ${data.zero_is}. ${
    data.left_out > 0 ? `${data.lanes.length} of ${number(ranks)} ranks have a lane: the culprits and some of each class. ` : ""
  }Drag to move, Ctrl and the wheel (or the buttons) to zoom.`;
  return (
    <Section id="timeline" title="Timeline" about={about}>
      <Chart data={data} selected={selected} />
      {data.arrivals.map((arrivals, index) => (
        <p key={index} class="arrivals">
          <strong>{arrivals.label}</strong>
          {": "}
          {arrivals.ranks.length > 1
            ? `${rankName(arrivals.ranks[0]!)} arrived first, ${rankName(arrivals.ranks.at(-1)!)} last of ${number(arrivals.ranks.length)}, ${seconds((arrivals.at.at(-1)! - arrivals.at[0]!) / 1e6)} later`
            : `only ${rankName(arrivals.ranks[0]!)} arrived`}
          {arrivals.absent ? `; ${ranksPhrase(arrivals.absent)} never arrived.` : "."}
        </p>
      ))}
      {data.notes.map((note, index) => <p key={index} class="dim">{note}</p>)}
    </Section>
  );
}

function Chart({ data, selected }: { data: Data; selected: number | null }) {
  const box = useRef<HTMLDivElement>(null);
  const canvas = useRef<HTMLCanvasElement>(null);
  const behavior = useRef<ZoomBehavior<HTMLCanvasElement, unknown> | null>(null);
  const view = useRef<readonly [number, number]>(data.window); // stays when the width changes
  const [width, setWidth] = useState(0);
  const [transform, setTransform] = useState<ZoomTransform | null>(null);
  const [spot, setSpot] = useState<Spot | null>(null);
  const [, redraw] = useState(0);

  const labels = useMemo(() => [...new Set(data.channels.map((channel) => channel.label))], [data]);
  const gutter = useMemo(() => Math.max(GUTTER, ...data.lanes.map((lane) => rankName(lane.rank).length * CHARACTER + 20)), [data]);
  const rows = Math.min(4, labels.length);
  const laneHeight = Math.max(18, rows * 8 + 8);
  const whole = useMemo(() => extent(data), [data]);
  const base = useMemo(() => scaleLinear().domain(whole).range([0, Math.max(1, width)]), [whole, width]);
  const scale: Scale = useMemo(() => (transform ? transform.rescaleX(base) : base), [transform, base]);

  useEffect(() => {
    const element = box.current;
    if (!element) return;
    const observer = new ResizeObserver(() => setWidth(Math.max(120, element.clientWidth - gutter)));
    observer.observe(element);
    return () => observer.disconnect();
  }, []);
  useEffect(() => onThemeChange(() => redraw((count) => count + 1)), []);

  // d3's zoom handles mouse, touch and pinch; the wheel alone scrolls the page. It is set before the chart is painted: else
  // the chart would show everything at first, and a click would be lost.
  useLayoutEffect(() => {
    const element = canvas.current;
    if (!element || !width) return;
    const made = zoom<HTMLCanvasElement, unknown>()
      .filter((event: MouseEvent) => (event.type === "wheel" ? event.ctrlKey || event.metaKey : !event.button))
      .scaleExtent([1, 1e7])
      .translateExtent([[0, 0], [width, 0]])
      .extent([[0, 0], [width, 0]])
      .on("zoom", (event: D3ZoomEvent<HTMLCanvasElement, unknown>) => {
        const [from, to] = event.transform.rescaleX(base).domain();
        view.current = [from!, to!];
        setTransform(event.transform);
      });
    behavior.current = made;
    select(element).call(made).on("dblclick.zoom", null);
    show(view.current);
  }, [width, data]);

  function show([from, to]: readonly [number, number]) {
    const element = canvas.current;
    if (!element || !behavior.current) return;
    const flat = scaleLinear().domain(whole).range([0, width]);
    const scaled = width / Math.max(1e-9, flat(to) - flat(from));
    select(element).call(behavior.current.transform, zoomIdentity.scale(scaled).translate(-flat(from), 0));
  }
  function magnify(factor: number) {
    if (canvas.current && behavior.current) select(canvas.current).call(behavior.current.scaleBy, factor);
  }
  function pan(share: number) {
    if (canvas.current && behavior.current && transform) select(canvas.current).call(behavior.current.translateBy, (share * width) / transform.k, 0);
  }
  function onKey(event: KeyboardEvent) {
    const actions: Record<string, () => void> = {
      ArrowLeft: () => pan(0.15),
      ArrowRight: () => pan(-0.15),
      "+": () => magnify(1.5),
      "=": () => magnify(1.5),
      "-": () => magnify(1 / 1.5),
      "0": () => show(data.window),
    };
    const act = actions[event.key];
    if (!act || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    act();
  }

  const height = data.lanes.length * laneHeight;
  useLayoutEffect(() => {
    if (canvas.current && width) draw(canvas.current, { data, labels, rows, laneHeight, width, height, scale, spot, selected });
  });

  function find(event: MouseEvent): Spot | null {
    const area = canvas.current!.getBoundingClientRect();
    const lane = Math.floor((event.clientY - area.top) / laneHeight);
    const ops = data.lanes[lane]?.ops;
    if (!ops) return null;
    const x = event.clientX - area.left;
    const y = event.clientY - area.top - lane * laneHeight;
    let best: { op: number; distance: number } | null = null;
    for (let op = 0; op < ops.start.length; op++) {
      const apart = rows > 1 ? Math.abs(Math.floor((y - 4) / 8) - rowOf(data, labels, rows, ops.channel[op]!)) : 0;
      const left = scale(ops.start[op]!);
      const right = scale(endOf(data, ops.end[op]!, ops.state[op]!, ops.start[op]!));
      const beside = x < left ? left - x : x > right ? x - right : 0;
      const distance = beside + 8 * apart;
      if (beside <= 4 && (!best || distance <= best.distance)) best = { op, distance };
    }
    return best ? { lane, op: best.op } : null;
  }

  return (
    <div class="timeline">
      <div class="timeline-tools">
        <span class="legend">
          {labels.slice(0, 12).map((label, index) => <span key={label}><i class={`swatch series-${(index % SERIES) + 1}`} />{label}</span>)}
          <span><i class="swatch swatch-open" />in flight</span>
          {data.lanes.some((lane) => lane.ops.state.includes(FOUND_LATER)) && <span><i class="swatch swatch-faded" />exact end unknown</span>}
          {data.lanes.some((lane) => lane.ops.state.includes(FAILED)) && <span><i class="swatch swatch-failed" />failed</span>}
        </span>
        <span class="zooms">
          <button type="button" class="icon-button" aria-label="Zoom in" title="Zoom in (+)" onClick={() => magnify(2)}><Icon name="plus" /></button>
          <button type="button" class="icon-button" aria-label="Zoom out" title="Zoom out (-)" onClick={() => magnify(0.5)}><Icon name="minus" /></button>
          <button type="button" class="button" onClick={() => show(data.window)}>Around 0</button>
          <button type="button" class="button" onClick={() => show(whole)}>Everything</button>
        </span>
      </div>
      <div class="timeline-box" ref={box} tabIndex={0} role="application" aria-label="Timeline. The arrow keys move, plus and minus zoom, 0 returns to the moment 0." onKeyDown={onKey}>
        <div class="axis" aria-hidden="true">
          {width > 0 && labelled(scale, width).map(([tick, text]) => (
            <span key={tick} style={{ left: `${gutter + scale(tick)}px` }}>{text}</span>
          ))}
        </div>
        <div class="lanes" style={{ height: `${height}px` }}>
          <div class="gutter" style={{ width: `${gutter}px` }}>
            {data.lanes.map((lane) => (
              <div key={lane.rank} class={`lane-name role-${lane.role} ${lane.rank === selected ? "selected" : ""}`} style={{ height: `${laneHeight}px` }}>
                <RankLink rank={lane.rank} text={rankName(lane.rank)} />
              </div>
            ))}
          </div>
          <canvas
            ref={canvas}
            style={{ width: `${width}px`, height: `${height}px` }}
            role="img"
            aria-label={`Collectives of ${data.lanes.length} ranks over time`}
            onMouseMove={(event) => setSpot(find(event))}
            onMouseLeave={() => setSpot(null)}
          />
        </div>
      </div>
      <p class="readout" aria-live="polite">{spot ? describe(data, data.lanes[spot.lane]!, spot.op) : "Point at a bar: the same collective is marked on every rank."}</p>
    </div>
  );
}

/** The ticks whose whole label is inside the axis, with their labels. */
function labelled(scale: Scale, width: number): [tick: number, text: string][] {
  const ticks = scale.ticks(Math.max(2, Math.floor(width / 130)));
  const texts = ticks.map((tick): [number, string] => [tick, relative(tick, ticks.length > 1 ? ticks[1]! - ticks[0]! : 0)]);
  return texts.filter(([tick, text]) => scale(tick) + (text.length * CHARACTER) / 2 < width);
}

function extent(data: Data): [number, number] {
  let first = Infinity;
  let last = data.captured;
  for (const lane of data.lanes) {
    for (const start of lane.ops.start) {
      first = Math.min(first, start);
      last = Math.max(last, start);
    }
  }
  first = Math.min(first, data.window[0]);
  last = Math.max(last, data.window[1]);
  const span = Math.max(1, last - first);
  return [first - span * 0.01, last + span * 0.02];
}

function endOf(data: Data, end: number, state: number, start: number): number {
  if (state === IN_FLIGHT) return Math.max(data.captured, start);
  return Math.max(end, start);
}

function rowOf(data: Data, labels: string[], rows: number, channel: number): number {
  return Math.min(rows - 1, labels.indexOf(data.channels[channel]!.label)); // the rarer kinds of groups share the last row
}

/** `+2.93 s`; with as many digits as tell apart values that are `step` microseconds apart. */
function relative(us: number, step: number): string {
  const size = Math.abs(us);
  if (size < 1e-6) return "0";
  const [unit, name] = size >= 1e6 ? [1e6, "s"] : size >= 1e3 ? [1e3, "ms"] : [1, "us"];
  const digits = Math.min(6, Math.max(0, Math.ceil(-Math.log10(step / unit!) - 1e-9)));
  return `${us < 0 ? "−" : "+"}${step > 0 && size < 120e6 ? `${(size / unit!).toFixed(digits)} ${name}` : seconds(size / 1e6)}`;
}

function describe(data: Data, lane: Lane, op: number): string {
  const { ops } = lane;
  const channel = data.channels[ops.channel[op]!]!;
  const start = ops.start[op]!;
  const state = ops.state[op]!;
  const fate = state === IN_FLIGHT
    ? data.captured_known ? `in flight for ${seconds((data.captured - start) / 1e6)}` : "in flight"
    : state === UNKNOWN
      ? "completion unknown"
      : `${state === FAILED ? "failed after" : state === FOUND_LATER ? "took at most" : "took"} ${seconds(Math.max(0, ops.end[op]! - start) / 1e6)}`;
  return [
    rankName(lane.rank),
    `${data.texts[ops.name[op]!]} #${ops.number[op]} of ${channel.label} [${channel.ranks}]`,
    data.texts[ops.asked[op]!],
    data.texts[ops.place[op]!],
    `at ${relative(start, 0)}, ${fate}`,
  ].filter(Boolean).join(" · ");
}

interface Drawing {
  data: Data;
  labels: string[];
  rows: number;
  laneHeight: number;
  width: number;
  height: number;
  scale: Scale;
  spot: Spot | null;
  selected: number | null;
}

function draw(canvas: HTMLCanvasElement, { data, labels, rows, laneHeight, width, height, scale, spot, selected }: Drawing): void {
  const ratio = Math.max(1, devicePixelRatio || 1);
  const pixels = { width: Math.round(width * ratio), height: Math.round(height * ratio) };
  if (canvas.width !== pixels.width || canvas.height !== pixels.height) Object.assign(canvas, pixels);
  const pen = canvas.getContext("2d")!;
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  const colours = {
    line: colour("--line"), text: colour("--text"), culprit: colour("--culprit"), culpritSoft: colour("--culprit-soft"), raised: colour("--raised"), page: colour("--page"),
    series: Array.from({ length: SERIES }, (_, index) => colour(`--series-${index + 1}`)),
  };
  data.lanes.forEach((lane, index) => {
    const top = index * laneHeight;
    if (lane.role === "culprit" || lane.rank === selected) {
      pen.fillStyle = lane.role === "culprit" ? colours.culpritSoft : colours.raised;
      pen.fillRect(0, top, width, laneHeight);
    }
    pen.fillStyle = colours.line;
    pen.fillRect(0, top + laneHeight - 1, width, 1);
  });
  pen.fillStyle = colours.line;
  for (const tick of scale.ticks(Math.max(2, Math.floor(width / 130)))) pen.fillRect(Math.round(scale(tick)), 0, 1, height);

  const marked = spot ? data.lanes[spot.lane]?.ops : undefined;
  const isMarked = (lane: Lane, op: number) =>
    marked !== undefined && spot !== null && lane.ops.channel[op] === marked.channel[spot.op] && lane.ops.number[op] === marked.number[spot.op] && lane.ops.name[op] === marked.name[spot.op];
  const barHeight = rows > 1 ? 7 : laneHeight - 9;
  const captured = scale(data.captured);
  data.lanes.forEach((lane, index) => {
    const { ops } = lane;
    for (let op = 0; op < ops.start.length; op++) {
      const state = ops.state[op]!;
      const left = scale(ops.start[op]!);
      const right = scale(endOf(data, ops.end[op]!, state, ops.start[op]!));
      if (right < -1 || left > width + 1) continue;
      const x = Math.max(-2, left);
      const wide = Math.max(1.5, Math.min(width + 2, right) - x - 0.5);
      const row = rowOf(data, labels, rows, ops.channel[op]!);
      const y = index * laneHeight + 4 + row * 8;
      const paint = colours.series[labels.indexOf(data.channels[ops.channel[op]!]!.label) % SERIES]!;
      if (state === IN_FLIGHT) {
        hatch(pen, x, y, wide, barHeight, paint, colours.page);
        if (captured > width) {
          pen.fillStyle = paint;
          pen.beginPath();
          pen.moveTo(width - 7, y - 2);
          pen.lineTo(width, y + barHeight / 2);
          pen.lineTo(width - 7, y + barHeight + 2);
          pen.fill();
        }
      } else {
        pen.globalAlpha = state === UNKNOWN || state === FOUND_LATER ? 0.45 : 1;
        pen.fillStyle = state === FAILED ? colours.culprit : paint;
        pen.fillRect(x, y, wide, barHeight);
        pen.globalAlpha = 1;
        if (wide > 3) { // mark its start, in case another bar is below it
          pen.fillStyle = colours.page;
          pen.fillRect(x, y, 1, barHeight);
        }
      }
      if (isMarked(lane, op)) {
        pen.strokeStyle = colours.text;
        pen.lineWidth = 1.5;
        pen.strokeRect(x - 0.5, y - 1, wide + 1, barHeight + 2);
      }
    }
  });
  const arrivals = data.arrivals[0];
  if (arrivals) drawArrivals(pen, data, arrivals, scale, labels, rows, laneHeight, colours.culprit);
  if (captured <= width && captured >= 0) {
    pen.strokeStyle = colours.text;
    pen.setLineDash([3, 3]);
    pen.lineWidth = 1;
    pen.beginPath();
    pen.moveTo(Math.round(captured) + 0.5, 0);
    pen.lineTo(Math.round(captured) + 0.5, height);
    pen.stroke();
    pen.setLineDash([]);
  }
}

/** A line through the times at which ranks reached the faulty collective, and a cross on the lanes of ranks that did not. */
function drawArrivals(pen: CanvasRenderingContext2D, data: Data, arrivals: Data["arrivals"][0], scale: Scale, labels: string[], rows: number, laneHeight: number, paint: string): void {
  const moments = new Map(arrivals.ranks.map((rank, index) => [rank, arrivals.at[index]!]));
  const absent = new Set(parseRanks(arrivals.absent));
  const last = scale(arrivals.at.at(-1) ?? 0);
  const middle = 4 + rowOf(data, labels, rows, arrivals.channel) * 8 + (rows > 1 ? 3.5 : (laneHeight - 9) / 2);
  pen.strokeStyle = paint;
  pen.fillStyle = paint;
  pen.lineWidth = 1.5;
  pen.beginPath();
  let begun = false;
  data.lanes.forEach((lane, index) => {
    const moment = moments.get(lane.rank);
    if (moment === undefined) return;
    const y = index * laneHeight + middle;
    if (begun) pen.lineTo(scale(moment), y);
    else pen.moveTo(scale(moment), y);
    begun = true;
  });
  pen.stroke();
  data.lanes.forEach((lane, index) => {
    const moment = moments.get(lane.rank);
    const y = index * laneHeight + middle;
    pen.beginPath();
    if (moment !== undefined) {
      pen.arc(scale(moment), y, 3, 0, 2 * Math.PI);
      pen.fill();
    } else if (absent.has(lane.rank)) {
      pen.moveTo(last - 4, y - 4);
      pen.lineTo(last + 4, y + 4);
      pen.moveTo(last + 4, y - 4);
      pen.lineTo(last - 4, y + 4);
      pen.lineWidth = 2;
      pen.stroke();
    }
  });
}

function hatch(pen: CanvasRenderingContext2D, x: number, y: number, width: number, height: number, paint: string, page: string): void {
  pen.save();
  pen.beginPath();
  pen.rect(x, y, width, height);
  pen.clip();
  pen.fillStyle = page;
  pen.fillRect(x, y, width, height);
  pen.globalAlpha = 0.3;
  pen.fillStyle = paint;
  pen.fillRect(x, y, width, height);
  pen.globalAlpha = 1;
  pen.strokeStyle = paint;
  pen.lineWidth = 1.5;
  pen.beginPath();
  const first = Math.floor((x - height) / 6) * 6;
  for (let at = first; at < x + width; at += 6) {
    pen.moveTo(at, y + height);
    pen.lineTo(at + height, y);
  }
  pen.stroke();
  pen.strokeRect(x + 0.5, y + 0.5, width, height - 1);
  pen.restore();
}
