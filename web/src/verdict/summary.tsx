import { CopyButton } from "../shared/copy";
import { capital, count, unbroken } from "../shared/words";
import type { Finding, SourceLines, VerdictPage } from "./data";
import { ranksPhrase } from "./parts";

const HEADLINES: Record<string, string> = {
  healthy: "No fault found", waiting: "Waiting, not stuck", straggler: "Straggler", undetermined: "Not enough evidence",
};
const TONES: Record<string, string> = { healthy: "good", waiting: "waiting", undetermined: "waiting" };

/** The answer, before everything else. */
export function Summary({ page }: { page: VerdictPage }) {
  const { verdict } = page;
  const hazards = verdict.findings.filter(isHazard);
  const [first, ...others] = verdict.findings.filter((finding) => !isHazard(finding));
  const latentOnly = verdict.kind === "healthy" && hazards.length > 0;
  const tone = latentOnly ? "waiting" : TONES[verdict.kind] ?? "fault";
  const kind = latentOnly ? "Latent faults only" : HEADLINES[verdict.kind] ?? verdict.kind.replace("/", ": ");
  return (
    <section id="verdict" class={`verdict ${tone}`} aria-labelledby="verdict-title">
      <p class="kind">
        <span class="chip kind-chip">{kind}</span>
        {verdict.why !== "unknown" && first && <span class="chip">{verdict.why.replaceAll("-", " ")}</span>}
        {first && <span class="chip">{verdict.confidence} confidence</span>}
      </p>
      <h1 id="verdict-title">{unbroken(headline(verdict.summary || verdict.kind))}</h1>
      <dl class="answer">
        {verdict.explanation && (
          <>
            <dt>Why</dt>
            <dd>{unbroken(headline(verdict.explanation))}</dd>
          </>
        )}
        {verdict.next_step && (
          <>
            <dt>Next</dt>
            <dd><strong>{unbroken(capital(sentence(verdict.next_step)))}</strong></dd>
          </>
        )}
        {page.restart && (
          <>
            <dt>Restart</dt>
            <dd>{unbroken(capital(sentence(page.restart)))}</dd>
          </>
        )}
        {first?.source_file && (
          <>
            <dt>Line</dt>
            <dd class="with-button">
              <code>{first.source_file}{first.function ? ` ${first.function}` : ""}</code>
              <CopyButton label="Copy the source line" text={first.source_file} bare />
            </dd>
            {page.source && <dd class="source"><Source source={page.source} /></dd>}
          </>
        )}
        {page.others && (
          <>
            <dt>{capital(ranksPhrase(page.others.ranks))}</dt>
            <dd class="with-button">
              <code>{page.others.place}</code>
              <CopyButton label={`Copy the source line of ${ranksPhrase(page.others.ranks)}`} text={page.others.place} bare />
            </dd>
            {page.others.source && <dd class="source"><Source source={page.others.source} /></dd>}
          </>
        )}
      </dl>
      <div class="buttons">
        <CopyButton label="Copy for a ticket" text={page.text} />
        <CopyButton label="Copy as JSON" text={() => JSON.stringify(verdict, null, 2)} />
      </div>
      {verdict.findings.length > (first ? 1 : 0) && <Others findings={others} hazards={hazards} />}
    </section>
  );
}

function Source({ source }: { source: SourceLines }) {
  const width = String(source.first + source.lines.length).length;
  return (
    <pre tabIndex={0} role="group" aria-label="Source">
      {source.lines.map((text, index) => {
        const number = source.first + index;
        return <span key={number} class={number === source.line ? "at" : ""}><span class="number">{String(number).padStart(width)}</span> {text}{"\n"}</span>;
      })}
    </pre>
  );
}

/** A latent fault of the program, which stands beside what the verdict is about. */
export function isHazard(finding: Finding): boolean {
  return finding.kind === "hazard";
}

function Others({ findings, hazards }: { findings: Finding[]; hazards: Finding[] }) {
  const roots = findings.filter((finding) => finding.root_cause);
  const rest = findings.filter((finding) => !finding.root_cause);
  return (
    <div class="others">
      {roots.length > 0 && <FindingList title="Also wrong, independently" findings={roots} />}
      {rest.length > 0 && <FindingList title="Also found" findings={rest} />}
      {hazards.length > 0 && <FindingList title="Latent faults" findings={hazards} />}
    </div>
  );
}

function FindingList({ title, findings }: { title: string; findings: Finding[] }) {
  return (
    <>
      <h2>{title}</h2>
      <ul class="findings">
        {findings.slice(0, 50).map((finding, index) => (
          <li key={index}>
            <details>
              <summary>{sentence(finding.summary)}</summary>
              {finding.explanation && <p>{finding.explanation}</p>}
              {finding.next_step && <p><strong>Next:</strong> {sentence(finding.next_step)}</p>}
              {finding.victims.length > 0 && <p class="dim">It holds up {count(finding.victims.length, "rank")}.</p>}
              {finding.evidence.length > 0 && <ul>{finding.evidence.map((text, at) => <li key={at}>{sentence(text)}</li>)}</ul>}
            </details>
          </li>
        ))}
      </ul>
      {findings.length > 50 && <p class="dim">{findings.length - 50} more are in the JSON.</p>}
    </>
  );
}

/** A sentence as a title; a name at its start, of a file or a tensor, is not capitalised. */
function headline(text: string): string {
  const title = sentence(text);
  return /^(ranks?|nodes?|nothing|there|no|only|the|strict|several|two) /.test(title) ? capital(title) : title;
}

/** With a full stop. */
export function sentence(text: string): string {
  const trimmed = text.trim();
  return /[.!?]$/.test(trimmed) ? trimmed : `${trimmed}.`;
}
