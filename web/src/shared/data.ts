// The page's data is embedded as gzip in base64; strings from files are only ever set as text.

const ELEMENT = "commlens-data";

/** Return the page's data; null for a page without any (the empty viewer). */
export async function embedded<T>(): Promise<T | null> {
  const element = document.getElementById(ELEMENT);
  const text = element?.textContent?.trim();
  if (!text) return null;
  return JSON.parse(await gunzip(bytesOf(text))) as T;
}

function bytesOf(base64: string): Uint8Array<ArrayBuffer> {
  const binary = atob(base64);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  return bytes;
}

export async function gunzip(bytes: Uint8Array<ArrayBuffer>): Promise<string> {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}
