// The page's data as a stream, so that a long trace is read piece by piece.

/** The stream and its length in bytes; null if the page has no data. */
export function embeddedStream(): { stream: ReadableStream<Uint8Array>; size: number } | null {
  const text = document.getElementById("commlens-data")?.textContent?.trim();
  if (!text) return null;
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let index = 0; index < binary.length; index++) bytes[index] = binary.charCodeAt(index);
  const size = new DataView(bytes.buffer).getUint32(bytes.length - 4, true); // gzip ends with it
  return { stream: new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip")), size };
}
