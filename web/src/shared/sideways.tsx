import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";

/** A box for what may be wider than the page; if it is, a line above it says that it scrolls. */
export function Sideways({ label, children, ...box }: { label: string; children: ComponentChildren; class: string; style?: Record<string, string> }) {
  const frame = useRef<HTMLDivElement>(null);
  const [wider, setWider] = useState(false);
  useEffect(() => {
    const element = frame.current!;
    const observer = new ResizeObserver(() => setWider(element.scrollWidth > element.clientWidth + 1));
    observer.observe(element);
    observer.observe(element.firstElementChild!);
    return () => observer.disconnect();
  }, []);
  return (
    <>
      {wider && <p class="dim sideways">Wider than the page: scroll it sideways.</p>}
      <div {...box} ref={frame} tabIndex={0} role="group" aria-label={label}>{children}</div>
    </>
  );
}
