import { useState } from "preact/hooks";
import { CopyButton } from "../shared/copy";
import { Section } from "../shared/page";
import { matches, Search } from "../shared/search";
import { count } from "../shared/words";
import type { StackClass, StackFrame, VerdictPage } from "./data";
import { RankSet, RoleChip, ranksPhrase } from "./parts";

const SHOWN = 8;

/** Stacks merged into classes: the user's lines first, the rest on demand. */
export function Stacks({ page }: { page: VerdictPage }) {
  const [query, setQuery] = useState("");
  const [all, setAll] = useState(false);
  if (page.stacks.length === 0) return null;
  const found = page.stacks.filter((stack) => matches(textOf(stack), query));
  const shown = all || query ? found : found.slice(0, SHOWN);
  return (
    <Section
      id="stacks"
      title="Stacks"
      about="Threads with the same stack share an entry; your own lines come first."
      tools={page.stacks.length > 2 && <Search value={query} onInput={setQuery} label="Search in the stacks" {...(query ? { found: `${found.length} of ${page.stacks.length}` } : {})} />}
    >
      <div class="stacks">{shown.map((stack, index) => <Stack key={`${stack.ranks} ${stack.thread} ${index}`} stack={stack} />)}</div>
      {shown.length < found.length && (
        <button type="button" class="button" onClick={() => setAll(true)}>Show {count(found.length - shown.length, "more stack")}</button>
      )}
    </Section>
  );
}

function textOf(stack: StackClass): string {
  return `${stack.ranks} ${stack.thread} ${stack.frames.map((frame) => `${frame.file} ${frame.function}`).join(" ")}`;
}

function plain(stack: StackClass): string {
  return `${ranksPhrase(stack.ranks)}, ${stack.thread}, innermost first:\n${stack.frames.map((frame) => `  ${frame.function}  ${frame.file}`).join("\n")}\n`;
}

export function Stack({ stack, bare }: { stack: StackClass; bare?: boolean }) {
  const own = stack.frames.filter((frame) => frame.kind === "user");
  const first = own.length > 0 ? own : stack.frames.slice(0, 3);
  return (
    <article class={`stack role-${stack.role}`}>
      {!bare && (
        <header>
          <strong><RankSet ranks={stack.ranks} /></strong>
          <RoleChip role={stack.role} />
          <span class="dim">{stack.thread}{stack.count > 1 ? `, ${count(stack.count, "rank")}` : ""}</span>
          <CopyButton label="Copy the stack" text={() => plain(stack)} bare />
        </header>
      )}
      {stack.note && <p class="dim">{stack.note}</p>}
      <ol class="frames">{first.map((frame, index) => <Frame key={index} frame={frame} top={index === 0} />)}</ol>
      {stack.frames.length > first.length && (
        <details>
          <summary>The whole stack, {count(stack.frames.length, "frame")}, innermost first</summary>
          <ol class="frames whole">{stack.frames.map((frame, index) => <Frame key={index} frame={frame} />)}</ol>
        </details>
      )}
    </article>
  );
}

function Frame({ frame, top }: { frame: StackFrame; top?: boolean }) {
  return (
    <li class={`frame frame-${frame.kind} ${top ? "top" : ""}`}>
      <span class="frame-function">{frame.function}</span> <span class="frame-place" title={frame.file}>{frame.place}</span>
      {frame.kind !== "user" && <span class="frame-kind">{frame.kind}</span>}
    </li>
  );
}
