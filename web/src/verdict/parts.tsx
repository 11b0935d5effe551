import { setAnchor } from "../shared/route";
import { ROLES, type Role } from "./data";

export function rankAnchor(rank: number): string {
  return `rank-${rank}`;
}

export function openRank(rank: number): void {
  setAnchor(rankAnchor(rank));
}

export function RankLink({ rank, text }: { rank: number; text?: string }) {
  return (
    <a
      class="rank-link"
      href={`#${rankAnchor(rank)}`}
      onClick={(event) => {
        event.preventDefault();
        openRank(rank);
      }}
    >
      {text ?? rank}
    </a>
  );
}

/** `rank 2`, `ranks 0-1,3`. */
export function ranksPhrase(ranks: string): string {
  return `${isOne(ranks) ? "rank" : "ranks"} ${ranks}`;
}

export function isOne(ranks: string): boolean {
  return /^\d+$/.test(ranks);
}

/** `rank 2`, `ranks 0-1,3`: each part leads to its first rank. */
export function RankSet({ ranks, bare }: { ranks: string; bare?: boolean }) {
  const parts = ranks.split(",");
  const single = isOne(ranks);
  const shown = parts.slice(0, 12);
  return (
    <span class="rank-set">
      {!bare && (single ? "rank " : "ranks ")}
      {shown.map((part, index) => (
        <>
          {index > 0 && ","}
          <RankLink key={part} rank={Number.parseInt(part, 10)} text={part} />
        </>
      ))}
      {parts.length > shown.length && <span title={ranks}>, ...</span>}
    </span>
  );
}

export function RoleChip({ role }: { role: Role }) {
  return role === "none" ? null : <span class={`chip role-${role}`}>{ROLES[role]}</span>;
}
