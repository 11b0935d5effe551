import { useEffect, useMemo, useState } from "preact/hooks";

/** Whether a media query matches, now and later. */
export function useMedia(query: string): boolean {
  const media = useMemo(() => matchMedia(query), [query]);
  const [matching, setMatching] = useState(media.matches);
  useEffect(() => {
    const follow = () => setMatching(media.matches);
    follow();
    media.addEventListener("change", follow);
    return () => media.removeEventListener("change", follow);
  }, [media]);
  return matching;
}
