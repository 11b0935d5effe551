import { useEffect, useRef, useState } from "preact/hooks";
import { Shell } from "../shared/page";
import { type Loaded, NoTrace, type Progress, readFile } from "./read";

/** The empty viewer, which takes a file. */
export function Empty({ onLoaded, progress }: { onLoaded: (loaded: Loaded) => void; progress: Progress }) {
  const [said, setSaid] = useState("");
  const chooser = useRef<HTMLInputElement>(null);
  const take = useTake(onLoaded, setSaid, progress);
  const over = useDropAnywhere(take);
  return (
    <Shell title="commlens trace" sections={[]}>
      <h1>Open a trace</h1>
      <p class="about">
        What <code>commlens trace</code>, <code>commlens preview</code> or <code>trace.save()</code> wrote (.json, .json.gz), or what CommDebugMode's{" "}
        <code>generate_json_dump</code> wrote. The file stays in this browser: this page cannot reach any network.
      </p>
      <div class={`drop ${over ? "over" : ""}`}>
        <p>Drop a file here, or</p>
        <button type="button" class="button" onClick={() => chooser.current?.click()}>Choose a file</button>
        <input
          ref={chooser} type="file" class="off-screen" tabIndex={-1} aria-label="A trace file"
          accept=".json,.gz,application/json,application/gzip"
          onChange={(event) => {
            const file = event.currentTarget.files?.[0];
            event.currentTarget.value = "";
            if (file) void take(file);
          }}
        />
      </div>
      <p role="alert" class={said ? "note" : ""}>{said}</p>
    </Shell>
  );
}

/** Read a file, or report why it cannot be read. */
function useTake(onLoaded: (loaded: Loaded) => void, say: (text: string) => void, progress: Progress): (file: File) => Promise<void> {
  return async (file) => {
    say("");
    try {
      onLoaded(await readFile(file, progress));
    } catch (error) {
      say(error instanceof NoTrace ? error.message : `${file.name} cannot be read: ${String(error)}.`);
    }
  };
}

/** Accept a file dropped anywhere on the page; return whether one is held over it. */
function useDropAnywhere(take: (file: File) => Promise<void>): boolean {
  const [over, setOver] = useState(false);
  const latest = useRef(take);
  latest.current = take;
  useEffect(() => {
    const hold = (event: DragEvent) => {
      event.preventDefault();
      setOver(true);
    };
    const leave = (event: DragEvent) => {
      if (!event.relatedTarget) setOver(false);
    };
    const drop = (event: DragEvent) => {
      event.preventDefault();
      setOver(false);
      const file = event.dataTransfer?.files[0];
      if (file) void latest.current(file);
    };
    addEventListener("dragover", hold);
    addEventListener("dragleave", leave);
    addEventListener("drop", drop);
    return () => {
      removeEventListener("dragover", hold);
      removeEventListener("dragleave", leave);
      removeEventListener("drop", drop);
    };
  }, []);
  return over;
}
