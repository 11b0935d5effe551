import type { ComponentChild } from "preact";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";

interface VirtualListProps {
  count: number;
  rowHeight: number;
  /** Maximum height of the visible part; shorter lists are as high as their rows. */
  height: number;
  row: (index: number) => ComponentChild;
  label: string;
  /** Scrolled into view whenever it changes. */
  shown?: number | undefined;
  class?: string;
  role?: "list" | "table" | "grid" | "tree" | "treegrid";
}

const OVERSCAN = 8;

/** Rows of equal height; only those in view are in the document. A print shows the first 200. */
export function VirtualList({ count, rowHeight, height, row, label, shown, class: name, role = "list" }: VirtualListProps) {
  const box = useRef<HTMLDivElement>(null);
  const [top, setTop] = useState(0);
  const [printing, setPrinting] = useState(false);
  const visible = Math.min(height, count * rowHeight);
  useEffect(() => {
    const before = () => setPrinting(true);
    const after = () => setPrinting(false);
    addEventListener("beforeprint", before);
    addEventListener("afterprint", after);
    return () => {
      removeEventListener("beforeprint", before);
      removeEventListener("afterprint", after);
    };
  }, []);
  useLayoutEffect(() => {
    const element = box.current;
    if (shown === undefined || shown < 0 || !element) return;
    const start = shown * rowHeight;
    if (start < element.scrollTop || start + rowHeight > element.scrollTop + visible) {
      element.scrollTop = Math.max(0, start - visible / 3);
    }
  }, [shown, rowHeight, visible]);
  const first = printing ? 0 : Math.max(0, Math.floor(top / rowHeight) - OVERSCAN);
  const last = printing ? Math.min(count, 200) : Math.min(count, Math.ceil((top + visible) / rowHeight) + OVERSCAN);
  const rows = [];
  for (let index = first; index < last; index++) rows.push(row(index));
  return (
    <div
      ref={box}
      class={`virtual ${name ?? ""}`}
      style={{ height: printing ? "auto" : `${visible}px` }}
      onScroll={(event) => setTop(event.currentTarget.scrollTop)}
      tabIndex={0}
      role={role}
      aria-label={label}
    >
      <div role="presentation" style={{ height: `${first * rowHeight}px` }} />
      {rows}
      <div role="presentation" style={{ height: `${printing ? 0 : (count - last) * rowHeight}px` }} />
    </div>
  );
}
