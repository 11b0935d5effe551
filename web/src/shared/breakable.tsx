/** A text whose long names may break behind `_`, `.`, `/` and `:`, rather than in the middle of a word. */
export function Breakable({ text }: { text: string }) {
  const parts = text.match(/[^_./:]+[_./:]*|[_./:]+/g) ?? [];
  return <>{parts.map((part, index) => (index > 0 ? [<wbr key={index} />, part] : part))}</>;
}
