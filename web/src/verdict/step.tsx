import { Section } from "../shared/page";
import { Sideways } from "../shared/sideways";
import type { VerdictPage } from "./data";

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
      {step.notes.map((note, index) => <p key={index} class="about">{note}</p>)}
    </Section>
  );
}
