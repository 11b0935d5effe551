import { Section } from "../shared/page";
import { Sideways } from "../shared/sideways";
import type { RankBar, RateBar, VerdictPage } from "./data";

/** Where the communication time of a step goes. */
export function Step({ page }: { page: VerdictPage }) {
  const step = page.step;
  if (step === null) return null;
  return (
    <Section id="step" title="Where a step's communication time goes">
      <p class="about">{step.answer}</p>
      <Sideways class="table-scroll" label="Communication time by group and place">
        <table class="aligned step">
          <thead>
            <tr>{step.headings.map((heading) => <th key={heading} scope="col">{heading}</th>)}</tr>
          </thead>
          <tbody>
            {step.rows.map((row, index) => (
              <tr key={index} class={row[0] ? "whole" : ""}>
                {row.map((cell, column) => <td key={column} data-heading={step.headings[column]} class={cell ? undefined : "empty"}>{cell}</td>)}
              </tr>
            ))}
          </tbody>
        </table>
      </Sideways>
      {step.bars.length > 0 && <Bars bars={step.bars} />}
      {step.rates.length > 0 && <Rates rates={step.rates} />}
      {step.notes.map((note, index) => <p key={index} class="about">{note}</p>)}
    </Section>
  );
}

/** A bar for each rank: what it waits, what it sends, and the rest, its own work. */
function Bars({ bars }: { bars: RankBar[] }) {
  const sends = bars.some((bar) => bar.sends > 0);
  return (
    <>
      <p class="about step-legend">
        A step by rank: <span class="waits">waiting</span> {sends && <><span class="sends">sending</span> </>}<span class="works">its own work</span>
      </p>
      <table class="step-bars">
        <tbody>
          {bars.map((bar) => (
            <tr key={bar.rank}>
              <th scope="row">{bar.rank}</th>
              <td aria-hidden="true">
                <svg viewBox="0 0 100 10" preserveAspectRatio="none">
                  <rect class="works" width="100" height="10" />
                  <rect class="waits" width={bar.waits} height="10" />
                  <rect class="sends" x={bar.waits} width={bar.sends} height="10" />
                </svg>
              </td>
              <td>{bar.text}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </>
  );
}

/** A bar for each kind of transfer: how much of the nominal rate of its links it reaches. */
function Rates({ rates }: { rates: RateBar[] }) {
  return (
    <>
      <p class="about step-legend">
        Bandwidth on the bus: <span class="sends">reached</span> <span class="works">nominal</span>
      </p>
      {rates.map((rate, index) => (
        <div key={index} class="step-rate">
          <svg viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">
            <rect class="works" width="100" height="10" />
            <rect class="sends" width={rate.percent} height="10" />
          </svg>
          <p>{rate.text}</p>
        </div>
      ))}
    </>
  );
}
