import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { CopyButton } from "../shared/copy";
import { Icon } from "../shared/icons";
import { VirtualList } from "../shared/list";
import { useMedia } from "../shared/media";
import { Section } from "../shared/page";
import { setAnchor } from "../shared/route";
import { matches, Search } from "../shared/search";
import { capital, number, seconds } from "../shared/words";
import { ROLES, type RankClass, type VerdictPage } from "./data";
import { openRank, rankInWorld, rankName, ranksPhrase, RoleChip } from "./parts";
import { Stack } from "./stacks";

const [ROW, TALL_ROW] = [34, 66];

/** Every rank, searchable; only the rows in view are in the document. */
export function AllRanks({ page, selected }: { page: VerdictPage; selected: number | null }) {
  const [query, setQuery] = useState("");
  const { ranks } = page;
  const tall = useMedia(selected === null ? "(max-width: 700px)" : "(max-width: 1399px)"); // a panel takes its room
  const row = tall ? TALL_ROW : ROW;
  const texts = useMemo(
    () => ranks.rank.map((rank, index) => `${rankName(rank)} ${ranks.texts[ranks.host[index]!]} ${page.classes[ranks.cls[index]!]?.each} ${page.classes[ranks.cls[index]!]?.place} ${ROLES[ranks.role[index]!]} ${ranks.texts[ranks.last[index]!]} ${ranks.texts[ranks.end[index]!]}`),
    [page],
  );
  const found = useMemo(() => {
    const asked = /^\s*(?:rank\s*)?(\d+)\s*$/.exec(query);
    const all = texts.map((_, index) => index);
    if (asked) return all.filter((index) => String(rankInWorld(ranks.rank[index]!)).startsWith(asked[1]!));
    return query ? all.filter((index) => matches(texts[index]!, query)) : all;
  }, [query, texts]);
  return (
    <Section
      id="ranks"
      title="All ranks"
      tools={<Search value={query} onInput={setQuery} label="Search ranks" {...(query ? { found: `${number(found.length)} of ${number(ranks.rank.length)}` } : {})} />}
    >
      <VirtualList
        label="All ranks"
        class={tall ? "rank-list tall" : "rank-list"}
        count={found.length}
        rowHeight={row}
        height={ROW * 12}
        shown={selected === null ? undefined : found.indexOf(ranks.rank.indexOf(selected))}
        row={(position) => {
          const index = found[position]!;
          const rank = ranks.rank[index]!;
          const known = page.classes[ranks.cls[index]!];
          return (
            <div key={rank} role="listitem" class={`rank-row role-${ranks.role[index]} ${rank === selected ? "selected" : ""}`} style={{ height: `${row}px` }}>
              <button type="button" onClick={() => openRank(rank)}>
                <span class="rank-row-name">{rankName(rank)}</span>
                <RoleChip role={ranks.role[index]!} />
                <span class="rank-row-doing">{known?.each}{known?.place ? <span class="mono dim"> {known.place}</span> : null}</span>
                <span class="rank-row-host dim">{ranks.texts[ranks.host[index]!]}</span>
              </button>
            </div>
          );
        }}
      />
      {found.length === 0 && <p class="dim">No rank matches.</p>}
    </Section>
  );
}

/** ` at train.py:57 load_batch`; without the function if the activity names it. */
function place({ each, place }: RankClass): string {
  const [line, name] = [place.slice(0, place.indexOf(" ")), place.slice(place.indexOf(" ") + 1)];
  return place ? ` at ${line && each === `is in ${name}` ? line : place}` : "";
}

/** The facts on one rank, in a panel beside the page. */
export function RankPanel({ page, rank }: { page: VerdictPage; rank: number }) {
  const { ranks } = page;
  const index = ranks.rank.indexOf(rank);
  const panel = useRef<HTMLElement>(null);
  useEffect(() => panel.current?.focus({ preventScroll: true }), [rank]);
  useEffect(() => {
    const close = (event: KeyboardEvent) => {
      if (event.key === "Escape") setAnchor("");
    };
    addEventListener("keydown", close);
    return () => removeEventListener("keydown", close);
  }, []);
  const text = (at: number | undefined) => (at === undefined ? "" : ranks.texts[at]!);
  const known = index >= 0 ? page.classes[ranks.cls[index]!] : undefined;
  const stack = index >= 0 && ranks.stack[index]! >= 0 ? page.stacks[ranks.stack[index]!] : undefined;
  const facts: [string, string][] = index < 0 ? [] : [
    ["Host", text(ranks.host[index])],
    ["Process", ranks.pid[index] ? String(ranks.pid[index]) : ""],
    ["State", text(ranks.end[index])],
    ["Last collective", text(ranks.last[index])],
    ["Issued", ranks.issued[index] ? number(ranks.issued[index]!) : ""],
    ["Steps", ranks.steps[index] ? number(ranks.steps[index]!) : ""],
    ["Read from", text(ranks.source[index])],
  ];
  const about = page.verdict.findings.filter((finding) => finding.culprits.includes(rank));
  return (
    <aside class="panel" ref={panel} tabIndex={-1} aria-label={capital(rankName(rank))}>
      <header>
        <h2>{capital(rankName(rank))}</h2>
        {index >= 0 && <RoleChip role={ranks.role[index]!} />}
        <span class="panel-tools">
          <CopyButton label="Copy a link to this view" text={() => location.href} bare />
          <button type="button" class="icon-button" aria-label="Close" title="Close (Esc)" onClick={() => setAnchor("")}><Icon name="close" /></button>
        </span>
      </header>
      {index < 0 ? <p>There is no {rankName(rank)} in this job.</p> : (
        <>
          {known && <p>{`It ${known.each}${place(known)}${known.detail ? `, ${known.detail}` : ""}${known.count > 1 ? `, like all of ${ranksPhrase(known.ranks)}` : ""}.`}</p>}
          <dl class="facts">{facts.filter(([, value]) => value).map(([name, value]) => <><dt>{name}</dt><dd>{value}</dd></>)}</dl>
          {about.map((finding, at) => <p key={at} class={finding.root_cause ? "blame" : "dim"}>{finding.summary}.</p>)}
          {stack && <><h3>Stack</h3><Stack stack={stack} bare /></>}
          <Issued page={page} rank={rank} />
        </>
      )}
    </aside>
  );
}

function Issued({ page, rank }: { page: VerdictPage; rank: number }) {
  const { timeline } = page;
  const lane = timeline.lanes.find((each) => each.rank === rank);
  if (!lane || lane.ops.start.length === 0) return null;
  const { ops } = lane;
  const last = ops.start.length - 1;
  const row = 46;
  return (
    <>
      <h3>Collectives, newest first</h3>
      <VirtualList
        label={`Collectives of ${rankName(rank)}`}
        class="op-list"
        count={ops.start.length}
        rowHeight={row}
        height={row * 8}
        row={(position) => {
          const op = last - position;
          const channel = timeline.channels[ops.channel[op]!]!;
          const state = ops.state[op]!;
          return (
            <div key={op} role="listitem" class={`op-row ${state === 1 ? "open" : ""}`} style={{ height: `${row}px` }}>
              <div>{timeline.texts[ops.name[op]!]} #{ops.number[op]} of {channel.label} <span class="dim">{state === 1 ? "in flight" : state === 2 ? "failed" : state === 3 ? "" : seconds(Math.max(0, ops.end[op]! - ops.start[op]!) / 1e6)}</span></div>
              <div class="mono dim">{timeline.texts[ops.place[op]!]} {timeline.texts[ops.asked[op]!]}</div>
            </div>
          );
        }}
      />
    </>
  );
}
