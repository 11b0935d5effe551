import { Section } from "../shared/page";
import type { VerdictPage } from "./data";
import { sentence } from "./summary";

/** What supports the verdict, what could not be known, and what was read. */
export function Evidence({ page }: { page: VerdictPage }) {
  const { verdict } = page;
  const first = verdict.findings[0];
  return (
    <Section id="evidence" title="Evidence">
      <div class="columns">
        <div>
          <h3>What supports it</h3>
          {first && first.evidence.length > 0 ? (
            <ul>{first.evidence.map((text, index) => <li key={index}>{sentence(text)}</li>)}</ul>
          ) : (
            <p class="dim">The verdict's own sentences say all that there is.</p>
          )}
        </div>
        <div>
          <h3>What is missing</h3>
          {verdict.missing_evidence.length > 0 ? (
            <ul>{verdict.missing_evidence.map((text, index) => <li key={index}>{sentence(text)}</li>)}</ul>
          ) : (
            <p class="dim">Nothing is known to be missing.</p>
          )}
          {first?.would_raise_confidence && <p>What would make it surer: {sentence(first.would_raise_confidence)}</p>}
        </div>
      </div>
      <h3>What was looked at</h3>
      <dl class="facts">
        {verdict.looked_at && (
          <>
            <dt>Records</dt>
            <dd>{sentence(verdict.looked_at)}</dd>
          </>
        )}
        {page.facts.map(([name, value]) => (
          <>
            <dt>{name}</dt>
            <dd>{value}</dd>
          </>
        ))}
        <dt>Made by</dt>
        <dd>commlens {page.commlens}</dd>
      </dl>
    </Section>
  );
}
