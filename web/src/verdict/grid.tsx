import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { Section } from "../shared/page";
import { Tabs } from "../shared/tabs";
import { countRole, ROLES, ROLE_ORDER, type Layout, type Role, type VerdictPage } from "./data";
import { openRank, rankInWorld, rankName } from "./parts";

const TALLEST = 440;
const GAP = 14;

interface Cell {
  rank: number;
  row: number;
  x: number;
  y: number;
}

interface Drawn {
  cell: number;
  width: number;
  height: number;
  labels: boolean;
  /** Names are left of the strips, not above them. */
  beside: boolean;
  cells: Cell[];
  strips: { x: number; y: number; width: number; name: string; fault: boolean }[];
}

/** All ranks, arranged by one kind of group at a time: every group is a strip of cells. */
export function Groups({ page, selected }: { page: VerdictPage; selected: number | null }) {
  const [chosen, setChosen] = useState("0");
  if (page.layouts.length === 0) return null;
  const tabs = page.layouts.map((layout, index) => ({
    id: String(index),
    name: layout.name === "hosts" ? "by host" : layout.name,
    body: () => <Grid key={index} page={page} layout={layout} selected={selected} />,
  }));
  return (
    <Section id="groups" title="Process groups" about={`Every cell is a rank; a strip is one group.${page.layouts.some((layout) => layout.rows.some((row) => row.fault)) ? " The group of the faulty collective is outlined." : ""}`}>
      <Legend page={page} />
      <Tabs tabs={tabs} chosen={chosen} onChoose={setChosen} label="Arrange the ranks by" />
    </Section>
  );
}

function Legend({ page }: { page: VerdictPage }) {
  const counts = new Map<Role, number>();
  for (const role of page.ranks.role) counts.set(role, (counts.get(role) ?? 0) + 1);
  return (
    <p class="legend">
      {ROLE_ORDER.filter((role) => counts.get(role)).map((role) => (
        <span key={role}><i class={`swatch cell-${role}`} />{countRole(role, counts.get(role)!)}</span>
      ))}
    </p>
  );
}

const NAME_CHARACTER = 6.4; // in pixels

/** Draw a few groups as the rows of a matrix, so that the groups across them are its columns. */
function matrix(layout: Layout, room: number): Drawn | null {
  const longest = Math.max(1, ...layout.rows.map((row) => row.ranks.length));
  const named = layout.rows.some((row) => row.name !== "") && layout.rows.length > 1;
  const left = named ? Math.min(0.4 * room, Math.max(...layout.rows.map((row) => row.name.length)) * NAME_CHARACTER + 16) : 4;
  const cell = Math.min(40, Math.floor((room - left) / longest), Math.floor(TALLEST / layout.rows.length));
  if (cell < 16) return null;
  return {
    cell,
    width: left + longest * cell + 4,
    height: layout.rows.length * cell + 6,
    labels: named,
    beside: true,
    cells: layout.rows.flatMap((row, number) => row.ranks.map((rank, index) => ({ rank, row: number, x: left + index * cell, y: 3 + number * cell }))),
    strips: layout.rows.map((row, number) => ({ x: left, y: 3 + number * cell, width: row.ranks.length * cell, name: row.name, fault: row.fault })),
  };
}

/** Break one long group into several lines. */
function folded(layout: Layout, room: number): Layout {
  const [only] = layout.rows;
  const columns = [64, 32, 16, 8].find((each) => each * 18 <= room) ?? 8;
  if (!only || only.ranks.length <= columns) return layout;
  const lines = Math.ceil(only.ranks.length / columns);
  return { ...layout, rows: Array.from({ length: lines }, (_, line) => ({ name: "", ranks: only.ranks.slice(line * columns, (line + 1) * columns), fault: false })) };
}

function arrange(layout: Layout, room: number): Drawn {
  if (layout.rows.length === 1) layout = folded(layout, room);
  const square = matrix(layout, room);
  if (square) return square;
  const longest = Math.max(1, ...layout.rows.map((row) => row.ranks.length));
  const labels = layout.rows.length <= 24 && layout.rows.length > 1;
  for (const cell of [36, 30, 26, 22, 18, 14, 11, 9, 7, 6, 5]) {
    const perLine = Math.max(1, Math.floor((room + GAP) / cell)); // cells of one line of a strip
    const columns = Math.min(longest, perLine);
    const strips = Math.max(1, Math.floor((room + GAP) / (columns * cell + GAP)));
    const gap = labels ? 22 : Math.max(4, Math.min(GAP, cell / 2));
    const lines = layout.rows.map((row) => Math.ceil(row.ranks.length / columns));
    let height = 0;
    for (let start = 0; start < lines.length; start += strips) height += Math.max(...lines.slice(start, start + strips)) * cell + gap;
    if (height > TALLEST && cell > 5) continue;
    const drawn: Drawn = { cell, width: Math.min(strips, layout.rows.length) * (columns * cell + GAP), height: 0, labels, beside: false, cells: [], strips: [] };
    let top = 0;
    for (let start = 0; start < layout.rows.length; start += strips) {
      const line = layout.rows.slice(start, start + strips);
      line.forEach((row, offset) => {
        const left = offset * (columns * cell + GAP) + 2;
        const y = top + (labels ? 18 : 3);
        drawn.strips.push({ x: left, y, width: Math.min(columns, row.ranks.length) * cell, name: row.name, fault: row.fault });
        row.ranks.forEach((rank, index) => {
          drawn.cells.push({ rank, row: start + offset, x: left + (index % columns) * cell, y: y + Math.floor(index / columns) * cell });
        });
      });
      top += Math.max(...lines.slice(start, start + strips)) * cell + gap;
    }
    drawn.height = top + 4;
    return drawn;
  }
  throw new Error("unreachable");
}

function Grid({ page, layout, selected }: { page: VerdictPage; layout: Layout; selected: number | null }) {
  const box = useRef<HTMLDivElement>(null);
  const [room, setRoom] = useState(0);
  const [hovered, setHovered] = useState<number | null>(null);
  useEffect(() => {
    const element = box.current;
    if (!element) return;
    const observer = new ResizeObserver(() => setRoom(element.clientWidth));
    observer.observe(element);
    setRoom(element.clientWidth);
    return () => observer.disconnect();
  }, []);
  const drawn = useMemo(() => (room ? arrange(layout, room - 4) : null), [layout, room]);
  const where = useMemo(() => new Map(page.ranks.rank.map((rank, index) => [rank, index])), [page]);
  const roleOf = (rank: number): Role => page.ranks.role[where.get(rank) ?? -1] ?? "none";
  const paths = useMemo(() => {
    const made = new Map<Role, string>();
    if (!drawn) return made;
    const size = drawn.cell - (drawn.cell > 8 ? 2 : 1);
    for (const cell of drawn.cells) {
      const role = roleOf(cell.rank);
      made.set(role, `${made.get(role) ?? ""}M${cell.x} ${cell.y}h${size}v${size}h${-size}z`);
    }
    return made;
  }, [drawn]);
  const shown = hovered ?? selected;
  function at(event: MouseEvent): Cell | undefined {
    if (!drawn) return undefined;
    const area = (event.currentTarget as Element).getBoundingClientRect();
    const x = event.clientX - area.left;
    const y = event.clientY - area.top;
    return drawn.cells.find((cell) => x >= cell.x && x < cell.x + drawn.cell && y >= cell.y && y < cell.y + drawn.cell);
  }
  function move(event: KeyboardEvent) {
    if (!drawn) return;
    const here = Math.max(0, drawn.cells.findIndex((cell) => cell.rank === shown));
    const row = drawn.cells[here]?.row ?? 0;
    const down = drawn.cells.findIndex((cell, index) => index > here && cell.row > row && cell.x >= drawn.cells[here]!.x);
    const up = drawn.cells.findLastIndex((cell, index) => index < here && cell.row < row && cell.x <= drawn.cells[here]!.x);
    const to: Record<string, number> = { ArrowRight: here + 1, ArrowLeft: here - 1, ArrowDown: down, ArrowUp: up, Home: 0, End: drawn.cells.length - 1 };
    if (event.key === "Enter" && shown !== null) openRank(shown);
    const next = to[event.key];
    if (next === undefined) return;
    event.preventDefault();
    const cell = drawn.cells[next];
    if (cell) setHovered(shown === null && event.key.startsWith("Arrow") ? drawn.cells[0]!.rank : cell.rank);
  }
  const marked = drawn?.cells.find((cell) => cell.rank === shown);
  return (
    <div>
      <p class="about">{layout.about}</p>
      <div
        class="grid-box"
        ref={box}
        tabIndex={0}
        role="application"
        aria-label={`${layout.name}: ranks as a grid. The arrow keys move, Enter opens a rank.`}
        onKeyDown={move}
        onBlur={() => setHovered(null)}
      >
        {drawn && (
          <svg
            width={Math.max(drawn.width, 1)}
            height={drawn.height}
            class="grid"
            onMouseMove={(event) => setHovered(at(event)?.rank ?? null)}
            onMouseLeave={() => setHovered(null)}
            onClick={(event) => {
              const cell = at(event);
              if (cell) openRank(cell.rank);
            }}
          >
            {[...paths].map(([role, path]) => <path key={role} class={`cell cell-${role} ${drawn.cell < 14 ? "small" : ""}`} d={path} />)}
            {drawn.cell < 14 && drawn.cells.filter((cell) => roleOf(cell.rank) === "culprit").slice(0, 200).map((cell) => (
              <circle key={`${cell.row}-${cell.rank}`} class="cell-found" cx={cell.x + drawn.cell / 2} cy={cell.y + drawn.cell / 2} r={7} />
            ))}
            {drawn.strips.map((strip, index) => (
              <g key={index}>
                {drawn.labels && (drawn.beside
                  ? <text class="strip-name beside" x={strip.x - 8} y={strip.y + drawn.cell / 2 + 3}>{clipped(strip.name, strip.x - 8)}</text>
                  : <text class="strip-name" x={strip.x} y={strip.y - 5}>{clipped(strip.name, strip.width)}</text>)}
                {strip.fault && <rect class="strip-fault" x={strip.x - 2.5} y={strip.y - 2.5} width={strip.width + 3} height={heightOf(drawn, index) + 3} rx="3" />}
              </g>
            ))}
            {drawn.cell >= 18 && drawn.cells.length <= 1500 && drawn.cells.map((cell) => (
              <text key={`${cell.row}-${cell.rank}`} class={`cell-number number-${roleOf(cell.rank)}`} x={cell.x + drawn.cell / 2 - 1} y={cell.y + drawn.cell / 2 + 3}>{rankInWorld(cell.rank)}</text>
            ))}
            {marked && <rect class="cell-marked" x={marked.x - 1} y={marked.y - 1} width={drawn.cell} height={drawn.cell} />}
          </svg>
        )}
      </div>
      <p class="readout" aria-live="polite">{shown === null ? "Point at a rank, or use the arrow keys." : describe(page, where.get(shown), shown)}</p>
    </div>
  );
}

function heightOf(drawn: Drawn, strip: number): number {
  const inside = drawn.cells.filter((cell) => cell.row === strip);
  return inside.length ? Math.max(...inside.map((cell) => cell.y)) + drawn.cell - drawn.strips[strip]!.y : 0;
}

function clipped(name: string, width: number): string {
  const most = Math.max(6, Math.floor(width / NAME_CHARACTER));
  return name.length > most ? `${name.slice(0, most - 1)}…` : name;
}

export function describe(page: VerdictPage, index: number | undefined, rank: number): string {
  if (index === undefined) return rankName(rank);
  const known = page.classes[page.ranks.cls[index]!];
  const host = page.ranks.texts[page.ranks.host[index]!];
  return [rankName(rank), host, known && `${known.each}${known.place ? ` at ${known.place}` : ""}`, ROLES[page.ranks.role[index]!]].filter(Boolean).join(" · ");
}
