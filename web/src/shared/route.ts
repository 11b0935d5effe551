import { useEffect, useState } from "preact/hooks";

/** The decoded fragment of the address: `rank-2`, `module=layers.3.attention`. */
export function anchor(): string {
  try {
    return decodeURIComponent(location.hash.slice(1));
  } catch {
    return location.hash.slice(1);
  }
}

/** Change the fragment without scrolling; with `push`, the browser's back button returns. */
export function setAnchor(value: string, push = true): void {
  const address = value ? `#${encodeURIComponent(value).replaceAll("%3D", "=").replaceAll("%26", "&").replaceAll("%2F", "/")}` : location.pathname;
  if (push) history.pushState(null, "", address);
  else history.replaceState(null, "", address);
  dispatchEvent(new HashChangeEvent("hashchange"));
}

export function useAnchor(): string {
  const [value, setValue] = useState(anchor());
  useEffect(() => {
    const follow = () => setValue(anchor());
    addEventListener("hashchange", follow);
    addEventListener("popstate", follow);
    return () => {
      removeEventListener("hashchange", follow);
      removeEventListener("popstate", follow);
    };
  }, []);
  return value;
}
