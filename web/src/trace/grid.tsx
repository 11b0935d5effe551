import type { ComponentChild } from "preact";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";

export interface Column<Row> {
  id: string;
  name: string;
  /** Of grid-template-columns. */
  width: string;
  numeric?: boolean;
  cell: (row: Row) => ComponentChild;
}

interface GridProps<Row> {
  label: string;
  columns: readonly Column<Row>[];
  rows: readonly Row[];
  keyOf: (row: Row) => string;
  /** In a tree: depth, and whether the row is open; undefined if it cannot be opened. */
  level?: (row: Row) => { depth: number; open: boolean | undefined };
  onOpen?: (row: Row, open: boolean) => void;
  onChoose?: (row: Row) => void;
  chosen?: string | null;
  rowClass?: (row: Row) => string;
  /** How many columns the first cell of a row takes. */
  wide?: (row: Row) => number;
  /** Of the visible part, at most, in rows. */
  most?: number;
  empty?: string;
  /** On a narrow screen: the first cell is above the others, with so many lines of text. */
  stacked?: number;
  /** Rows have two lines of text where the grid is narrower than this, in pixels. */
  wraps?: number;
}

const LINE = 21;
const OVERSCAN = 10;

/** A table or tree whose visible rows alone are in the document. Arrow keys move, Enter selects. */
export function Grid<Row>(props: GridProps<Row>) {
  const { columns, rows, keyOf, level, onOpen, onChoose, chosen, rowClass, wide, most = 18, stacked = 0, wraps = 0 } = props;
  const box = useRef<HTMLDivElement>(null);
  const [room, setRoom] = useState(Infinity);
  const wrapped = !stacked && room < wraps;
  const ROW = 30 + LINE * (stacked || (wrapped ? 1 : 0));
  const HEAD = stacked ? 2 * LINE + 10 : 30;
  const [top, setTop] = useState(0);
  const [active, setActive] = useState(0);
  const [printing, setPrinting] = useState(false);
  const [id] = useState(() => `grid-${++made}`);
  const height = Math.min(Math.ceil((most * 30) / ROW), rows.length) * ROW;
  useEffect(() => {
    const [before, after] = [() => setPrinting(true), () => setPrinting(false)];
    addEventListener("beforeprint", before);
    addEventListener("afterprint", after);
    return () => {
      removeEventListener("beforeprint", before);
      removeEventListener("afterprint", after);
    };
  }, []);
  useLayoutEffect(() => {
    const element = box.current;
    if (!wraps || !element) return;
    const observer = new ResizeObserver(() => setRoom(element.offsetWidth));
    observer.observe(element);
    setRoom(element.offsetWidth);
    return () => observer.disconnect();
  }, [wraps, rows.length === 0]);
  const place = chosen == null ? -1 : rows.findIndex((row) => keyOf(row) === chosen);
  useLayoutEffect(() => {
    if (place < 0) return;
    setActive(place);
    show(place);
  }, [place]);
  const here = Math.min(active, rows.length - 1);
  function show(index: number) {
    const element = box.current;
    if (!element) return;
    if (index * ROW < element.scrollTop) element.scrollTop = index * ROW;
    else if ((index + 1) * ROW > element.scrollTop + height) element.scrollTop = (index + 1) * ROW - height;
  }
  function move(event: KeyboardEvent) {
    const row = rows[here];
    if (!row || event.altKey || event.ctrlKey || event.metaKey) return;
    const steps: Record<string, number> = {
      ArrowDown: here + 1, ArrowUp: here - 1, PageDown: here + most - 1, PageUp: here - most + 1, Home: 0, End: rows.length - 1,
    };
    let to = steps[event.key];
    const where = level?.(row);
    if (event.key === "ArrowRight" && where) {
      if (where.open === false) onOpen?.(row, true);
      else if (where.open) to = here + 1;
    } else if (event.key === "ArrowLeft" && where) {
      if (where.open) onOpen?.(row, false);
      else for (to = here; to > 0 && level!(rows[to]!).depth >= where.depth; ) to--;
    } else if (event.key === "Enter" || event.key === " ") {
      if (onChoose) onChoose(row);
      else if (where?.open !== undefined) onOpen?.(row, !where.open);
    } else if (to === undefined) return;
    event.preventDefault();
    if (to === undefined) return;
    const next = Math.max(0, Math.min(rows.length - 1, to));
    setActive(next);
    show(next);
  }
  const first = printing ? 0 : Math.max(0, Math.floor(top / ROW) - OVERSCAN);
  const last = printing ? Math.min(rows.length, 200) : Math.min(rows.length, Math.ceil((top + height) / ROW) + OVERSCAN);
  const beside = stacked ? columns.slice(1) : columns;
  const style = { gridTemplateColumns: beside.map(width).join(" "), minWidth: `${least(beside)}rem`, ...(stacked || wrapped ? { height: `${ROW}px`, "--lines": stacked || 2 } : {}) };
  const visible = [];
  for (let index = first; index < last; index++) {
    const row = rows[index]!;
    const where = level?.(row);
    const span = stacked ? 1 : wide?.(row) ?? 1;
    visible.push(
      <div
        key={keyOf(row)}
        id={`${id}-${index}`}
        role="row"
        aria-rowindex={index + 2}
        aria-level={where ? where.depth + 1 : undefined}
        aria-expanded={where?.open}
        aria-selected={index === place || undefined}
        class={`grid-row ${index === here ? "active" : ""} ${index === place ? "chosen" : ""} ${rowClass?.(row) ?? ""}`}
        style={style}
        onClick={() => {
          setActive(index);
          onChoose?.(row);
        }}
      >
        {columns.map((column, at) => (at > 0 && at < span ? null : (
          <div
            key={column.id}
            role={at === 0 ? "rowheader" : "gridcell"}
            aria-colindex={at + 1}
            aria-colspan={at === 0 && span > 1 ? span : undefined}
            class={column.numeric ? "numeric" : ""}
            style={at === 0 && span > 1 ? { gridColumn: `span ${span}` } : undefined}
          >
            {at === 0 && where ? (
              <span class="tree-cell" style={{ paddingLeft: `${where.depth * 1.1}rem` }}>
                {where.open === undefined ? <span class="twisty" /> : (
                  <button
                    type="button"
                    class={`twisty ${where.open ? "open" : ""}`}
                    tabIndex={-1}
                    aria-label={where.open ? "Close" : "Open"}
                    onClick={(event) => {
                      event.stopPropagation();
                      onOpen?.(row, !where.open);
                    }}
                  />
                )}
                {column.cell(row)}
              </span>
            ) : column.cell(row)}
          </div>
        )))}
      </div>,
    );
  }
  if (!rows.length) return <p class="dim">{props.empty ?? "Nothing to show."}</p>;
  return (
    <div
      class={stacked ? "grid stacked" : wrapped ? "grid wrapped" : "grid"}
      role={level ? "treegrid" : "grid"}
      aria-label={props.label}
      aria-rowcount={rows.length + 1}
      aria-colcount={columns.length}
      aria-activedescendant={here >= first && here < last ? `${id}-${here}` : undefined}
      ref={box}
      tabIndex={0}
      style={{ height: printing ? "auto" : `${height + HEAD + 2}px` }}
      onScroll={(event) => setTop(event.currentTarget.scrollTop)}
      onKeyDown={move}
    >
      <div class="grid-head grid-row" role="row" aria-rowindex={1} style={{ ...style, height: `${HEAD}px`, "--lines": 1 }}>
        {columns.map((column) => <div key={column.id} role="columnheader" class={column.numeric ? "numeric" : ""}>{column.name}</div>)}
      </div>
      <div role="presentation" style={{ height: `${first * ROW}px` }} />
      {visible}
      <div role="presentation" style={{ height: `${printing ? 0 : (rows.length - last) * ROW}px` }} />
    </div>
  );
}

/** A column's width, at least as wide as its name. */
function width<Row>(column: Column<Row>): string {
  return column.width.replace(/[\d.]+(?=rem)/, (least) => String(Math.max(Number(least), column.name.length * 0.61 + 0.3)));
}

/** The minimum width of the columns with gaps and padding, in rem, so that all rows are equally wide. */
function least<Row>(columns: readonly Column<Row>[]): number {
  return columns.reduce((sum, column) => sum + Number(/([\d.]+)rem/.exec(width(column))?.[1] ?? 0) + 0.8, 0.6);
}

/** A sentence in one line, with the line of code at its end: if there is no room, its middle is left out. A row of two lines has both in a flow. */
export function Clipped({ text, line, dim }: { text: string; line: string; dim?: boolean }) {
  return (
    <span class={dim ? "cut dim" : "cut"} title={text + line}>
      <span class="clip">{text}</span>
      {line && <span class="cut-line">{line}</span>}
    </span>
  );
}

let made = 0;
