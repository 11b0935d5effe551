import { Section } from "../shared/page";
import { Sideways } from "../shared/sideways";
import type { HardwareChange, VerdictPage } from "./data";
import { ranksPhrase } from "./parts";

const MARKS = { explains: "may explain the fault", coincides: "at the time of the fault" } as const;

/** What changed in the hardware of the job's nodes. */
export function Hardware({ page }: { page: VerdictPage }) {
  const table = page.hardware;
  if (table === null) return null;
  const days = new Set(table.changes.flatMap(({ at, since }) => [at, since || at].map((time) => time.slice(0, 10))));
  const day = days.size === 1 ? [...days][0]! : "";
  return (
    <Section id="hardware" title="What changed in the hardware">
      <p class="about">
        Changes since the first look at each node, in the order of their times (UTC{day && `, ${day}`}). A change with two times happened between them.
        {table.left_out && ` ${table.left_out}.`}
      </p>
      <Sideways class="table-scroll" label="Changes of the hardware">
        <table class="aligned hardware">
          <thead>
            <tr>
              <th scope="col">Time</th>
              <th scope="col">Node</th>
              <th scope="col">Change</th>
            </tr>
          </thead>
          <tbody>
            {table.changes.map((change, index) => (
              <tr key={index} class={change.mark === "explains" ? "fault" : ""}>
                <td class="hardware-time">{times(change, day)}</td>
                <td>
                  {change.node} <span class="dim">{ranksPhrase(change.ranks)}</span>
                </td>
                <td>
                  {change.what} {change.mark && <span class={`chip ${change.mark === "explains" ? "role-culprit" : ""}`}>{MARKS[change.mark]}</span>}
                </td>
              </tr>
            ))}
          </tbody>
        </table>
      </Sideways>
    </Section>
  );
}

/** The time of a change, without the day if all happened on it. */
function times({ at, since }: HardwareChange, day: string): string {
  return [since, at].filter(Boolean).map((time) => (day ? time.slice(11) : time)).join(" – ");
}
