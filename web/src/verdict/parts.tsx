import { setAnchor } from "../shared/route";
import { formatRanks, parseRanks } from "../shared/words";
import { ROLES, type Role, type Worlds } from "./data";

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

/** Some ranks of one world: `first` is the number of its rank 0. Where the world is one process, its name alone names the rank. */
interface Named {
  name: string;
  first: number;
  ranks: number[];
  after: string;
  alone?: boolean;
}

let worlds: Worlds | null = null;

/** From here on, take ranks for numbers of processes, and name each by its world and its rank there: as naming_worlds in src/commlens/text.py. */
export function nameWorlds(of: Worlds): void {
  worlds = of.worlds.length > 1 || of.outsiders.length > 0 ? of : null;
}

function plainly(numbers: number[]): Named {
  return { name: numbers.length === 1 ? "rank" : "ranks", first: 0, ranks: numbers, after: "" };
}

function named(numbers: number[]): Named[] {
  if (!worlds) return [plainly(numbers)];
  const several = worlds.worlds.length > 1;
  const known = worlds.worlds.map(({ name, first, size }): Named => {
    const ranks = numbers.filter((number) => number >= first && number < first + size).map((number) => number - first);
    if (!several) return { ...plainly(ranks), first };
    const alone = size === 1;
    return { name: alone || !/\d$/.test(name) ? name : `${name} ${plainly(ranks).name}`, first, ranks, after: "", alone };
  });
  const others = worlds.outsiders.filter(({ number }) => numbers.includes(number)).map(({ number, group, member }): Named => (
    { name: "member", first: number - member, ranks: [member], after: ` of group ${group}` }
  ));
  const named = new Set([...known, ...others].flatMap(({ first, ranks }) => ranks.map((rank) => first + rank)));
  return [...known, ...others, plainly(numbers.filter((number) => !named.has(number)))].filter(({ ranks }) => ranks.length > 0);
}

/** `rank 2`; `trainer 0` in a job of several worlds. */
export function rankName(rank: number): string {
  return ranksPhrase(String(rank));
}

/** The rank in its world. */
export function rankInWorld(rank: number): number {
  return named([rank])[0]?.ranks[0] ?? rank;
}

/** `rank 2`, `ranks 0-1,3`; `trainer 0 and rollout 0-1`. */
export function ranksPhrase(ranks: string): string {
  const parts = named(parseRanks(ranks)).map(({ name, ranks, after, alone }) => alone ? name : `${name} ${formatRanks(ranks)}${after}`);
  return parts.length > 1 ? `${parts.slice(0, -1).join(", ")} and ${parts.at(-1)}` : parts[0] ?? `ranks ${ranks}`;
}

export function isOne(ranks: string): boolean {
  return /^\d+$/.test(ranks);
}

/** As ranksPhrase; each part leads to its first rank. */
export function RankSet({ ranks }: { ranks: string }) {
  return <span class="rank-set">{named(parseRanks(ranks)).map((each, index) => <>{index > 0 && ", "}<OfWorld {...each} /></>)}</span>;
}

function OfWorld({ name, first, ranks, after, alone }: Named) {
  if (alone) return <RankLink rank={first} text={name} />;
  const parts = formatRanks(ranks).split(",");
  const shown = parts.slice(0, 12);
  return (
    <>
      {name}{" "}
      {shown.map((part, index) => (
        <>
          {index > 0 && ","}
          <RankLink key={part} rank={first + Number.parseInt(part, 10)} text={part} />
        </>
      ))}
      {parts.length > shown.length && <span title={parts.join(",")}>, ...</span>}
      {after}
    </>
  );
}

export function RoleChip({ role }: { role: Role }) {
  return role === "none" ? null : <span class={`chip role-${role}`}>{ROLES[role]}</span>;
}
