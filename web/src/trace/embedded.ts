// What the page carries, as a stream: a long trace is read piece by piece.

/** Bytes of text, and how many there will be; null where the page carries nothing. */
export function embeddedStream(): { stream: ReadableStream<Uint8Array>; size: number } | null {
  const text = document.getElementById("commlens-data")?.textContent?.trim();
  if (!text) return null;
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let index = 0; index < binary.length; index++) bytes[index] = binary.charCodeAt(index);
  const size = new DataView(bytes.buffer).getUint32(bytes.length - 4, true); // gzip ends with it
  return { stream: new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip")), size };
}
