import { Section } from "../shared/page";
import type { VerdictPage } from "./data";
import { isHazard, sentence } from "./summary";

/** The evidence for the verdict, the evidence that is missing, and the files that were read. */
export function Evidence({ page }: { page: VerdictPage }) {
  const { verdict } = page;
  const first = verdict.findings.find((finding) => !isHazard(finding));
  const unsure = verdict.confidence === "high" ? null : first?.would_raise_confidence;
  return (
    <Section id="evidence" title="Evidence">
      <div class="columns">
        {first && first.evidence.length > 0 && <div><h3>In support of the verdict</h3><Sentences texts={first.evidence} /></div>}
        {verdict.missing_evidence.length > 0 && <div><h3>Missing</h3><Sentences texts={verdict.missing_evidence} /></div>}
        {unsure && <div><h3>Confidence: {verdict.confidence}</h3><p>{sentence(unsure)}</p></div>}
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

function Sentences({ texts }: { texts: readonly string[] }) {
  return <ul>{texts.map((text, index) => <li key={index}>{sentence(text)}</li>)}</ul>;
}
