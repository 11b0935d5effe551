// Numbers, sizes and durations in words.

export function number(value: number): string {
  return value.toLocaleString("en-US");
}

/** `512 B`, `4.1 kB`, `16.8 MB`: as in src/commlens/text.py. */
export function size(amount: number): string {
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let unit = 0;
  while (Math.abs(amount) >= 999.5 && unit < units.length - 1) {
    amount /= 1000;
    unit++;
  }
  return `${amount.toFixed(unit === 0 || Math.abs(amount) >= 99.95 ? 0 : 1)} ${units[unit]}`;
}

/** `1.2 s`, `350 ms`, `4.0 us`, `3 min 5 s`. */
export function seconds(value: number): string {
  const size = Math.abs(value);
  if (size >= 3600) return `${Math.floor(value / 3600)} h ${Math.round((value % 3600) / 60)} min`;
  if (size >= 120) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  if (size >= 1) return `${Number(value.toPrecision(3))} s`;
  if (size >= 1e-3) return `${Number((value * 1e3).toPrecision(3))} ms`;
  return `${Number((value * 1e6).toPrecision(3))} us`;
}

/** The text with no line break between a number and its unit. */
export function unbroken(text: string): string {
  return text.replace(/(\d) (ms|s|min|h|B|[kMGTP]B)\b/g, "$1\u00a0$2");
}

/** With a capital letter. */
export function capital(text: string): string {
  return text.slice(0, 1).toUpperCase() + text.slice(1);
}

/** `2 ranks`, `1 rank`. */
export function count(value: number, one: string, many = `${one}s`): string {
  return `${number(value)} ${value === 1 ? one : many}`;
}

/** `[0, 1, 3]` becomes "0-1,3", `[0, 8, 16, 24]` becomes "0-24:8", as in commlens/text.py. */
export function formatRanks(ranks: Iterable<number>): string {
  const left = [...new Set(ranks)].sort((a, b) => a - b);
  const parts: string[] = [];
  for (let start = 0; start < left.length; ) {
    let end = start + 1;
    const stride = end < left.length ? left[end]! - left[start]! : 1;
    while (end + 1 < left.length && left[end + 1]! - left[end]! === stride) end++;
    if (end >= left.length) {
      parts.push(String(left[start]));
      break;
    }
    const many = end - start + 1;
    if (stride === 1) parts.push(`${left[start]}-${left[end]}`);
    else if (many >= 4) parts.push(`${left[start]}-${left[end]}:${stride}`);
    else {
      parts.push(String(left[start]));
      start++;
      continue;
    }
    start = end + 1;
  }
  return parts.join(",");
}

/** `0-1,3` becomes [0, 1, 3]: the ranks that formatRanks wrote. */
export function parseRanks(text: string): number[] {
  return text.split(",").filter(Boolean).flatMap((part) => {
    const [span, step] = part.split(":");
    const [first, last] = span!.split("-").map(Number);
    return Array.from({ length: Math.floor(((last ?? first!) - first!) / Number(step ?? 1)) + 1 }, (_, index) => first! + index * Number(step ?? 1));
  });
}
