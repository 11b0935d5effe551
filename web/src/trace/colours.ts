// The process groups with most bytes have a colour each; the others share the last colour.

import type { Trace } from "./model";

const SERIES = 6;

export function groupColours(trace: Trace): Map<string, string> {
  const bytes = new Map<string, number>();
  for (const event of trace.events) {
    const label = trace.groupOf(event).label;
    bytes.set(label, (bytes.get(label) ?? 0) + event.wireBytes * event.count + event.count / 1e9);
  }
  const ordered = [...bytes].sort((a, b) => b[1] - a[1]);
  return new Map(ordered.map(([label], index) => [label, `--series-${Math.min(index, SERIES - 1) + 1}`]));
}
