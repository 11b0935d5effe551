import { Section } from "../shared/page";
import type { VerdictPage } from "./data";
import { isHazard, sentence } from "./summary";

/** The evidence for the verdict, the evidence that is missing, and the files that were read. */
export function Evidence({ page }: { page: VerdictPage }) {
  const { verdict } = page;
  const first = verdict.findings.find((finding) => !isHazard(finding));
  return (
    <Section id="evidence" title="Evidence">
      <div class="columns">
        <div>
          <h3>In support of the verdict</h3>
          {first && first.evidence.length > 0 ? (
            <ul>{first.evidence.map((text, index) => <li key={index}>{sentence(text)}</li>)}</ul>
          ) : (
            <p class="dim">There is no evidence beyond the sentences of the verdict.</p>
          )}
        </div>
        <div>
          <h3>Missing</h3>
          {verdict.missing_evidence.length > 0 ? (
            <ul>{verdict.missing_evidence.map((text, index) => <li key={index}>{sentence(text)}</li>)}</ul>
          ) : (
            <p class="dim">No evidence is known to be missing.</p>
          )}
          {first?.would_raise_confidence && verdict.confidence !== "high" && <p>Confidence: {verdict.confidence}. {sentence(first.would_raise_confidence)}</p>}
        </div>
      </div>
      <h3>Sources</h3>
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
