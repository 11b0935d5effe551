import { Section } from "../shared/page";
import { Sideways } from "../shared/sideways";
import { count } from "../shared/words";
import type { Compared, DivergedTensor, VerdictPage } from "./data";
import { RankSet } from "./parts";

const RANKS_MAX = 64;

/** The tensors that ranks have differently, by rank: the same letter is the same bytes. And the checks before. */
export function Numbers({ page }: { page: VerdictPage }) {
  const cause = page.verdict.cause;
  const tensors = divergedTensors(page);
  const ranks = (cause?.ranks ?? []).slice(0, RANKS_MAX);
  if (!cause || tensors.length === 0) return null;
  const more = (cause.differing ?? tensors.length) - tensors.length;
  const leftOut = (cause.ranks ?? []).length - ranks.length;
  return (
    <Section id="numbers" title="Tensors by rank">
      <p class="about">Ranks with the same letter have the same bytes; A is on the most ranks. A dash stands for a rank that was not compared.</p>
      <Sideways class="table-scroll" label="Tensors by rank">
        <table class="aligned numbers">
          <thead>
            <tr>
              <th scope="col">Tensor</th>
              {ranks.map((rank) => (
                <th key={rank} scope="col"><RankSet ranks={String(rank)} /></th>
              ))}
            </tr>
          </thead>
          <tbody>
            {tensors.map((tensor, index) => (
              <tr key={index}>
                <th scope="row">{tensor.name}<span class="row-note">{tensor.kind.replace("-", " ")}</span></th>
                {ranks.map((rank) => <Side key={rank} tensor={tensor} rank={rank} />)}
              </tr>
            ))}
          </tbody>
        </table>
      </Sideways>
      {more > 0 && <p class="dim">{count(more, "more tensor differs", "more tensors differ")}.</p>}
      {leftOut > 0 && <p class="dim">{count(leftOut, "more rank is not shown", "more ranks are not shown")}.</p>}
      <History checks={cause.history ?? []} />
    </Section>
  );
}

/** The tensors that have other bytes on some ranks. */
export function divergedTensors(page: VerdictPage): DivergedTensor[] {
  const tensors = page.verdict.kind === "diverged" ? page.verdict.cause?.tensors ?? [] : [];
  return tensors.filter((tensor) => tensor.sides.length > 1);
}

function Side({ tensor, rank }: { tensor: DivergedTensor; rank: number }) {
  const side = tensor.sides.findIndex((each) => each.ranks.includes(rank));
  if (side < 0) return <td class="side dim">-</td>;
  const { digest, norm, mean } = tensor.sides[side]!;
  const number = tensor.kind === "hyperparameter" ? rounded("value", mean, 6) : rounded("norm", norm, 9);
  const about = [`hash ${digest}`, number].filter(Boolean).join(", ");
  return <td class={`side side-${Math.min(side, 4)}`} title={about}>{String.fromCharCode(65 + Math.min(side, 25))}</td>;
}

function rounded(label: string, value: number | undefined, digits: number): string {
  return value == null ? "" : `${label} ${Number(value.toPrecision(digits))}`;
}

function History({ checks }: { checks: Compared[] }) {
  if (checks.length === 0) return null;
  return (
    <>
      <h3>Checks</h3>
      <ol class="checks">
        {checks.map((check) => (
          <li key={check.step} class={check.differing ? "differs" : ""}>
            step {check.step}: {check.differing ? count(check.differing, "tensor differs", "tensors differ") : "all equal"}
          </li>
        ))}
      </ol>
    </>
  );
}
