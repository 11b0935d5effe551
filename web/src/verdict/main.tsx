import "../shared/base.css";
import "./verdict.css";
import { CopyButton } from "../shared/copy";
import { Shell } from "../shared/page";
import { useAnchor } from "../shared/route";
import { start } from "../shared/start";
import type { VerdictPage } from "./data";
import { Evidence } from "./evidence";
import { WaitGraph } from "./graph";
import { Groups } from "./grid";
import { Hardware } from "./hardware";
import { Numbers, divergedTensors } from "./numbers";
import { AllRanks, RankPanel } from "./ranks";
import { Stacks } from "./stacks";
import { Step } from "./step";
import { Summary } from "./summary";
import { Aligned } from "./table";
import { Timeline } from "./timeline";

function Page({ page }: { page: VerdictPage }) {
  const asked = /^rank-(\d+)$/.exec(useAnchor());
  const selected = asked ? Number(asked[1]) : null;
  const sections = [
    ["verdict", "Verdict"],
    ["numbers", "Tensors"],
    ["waiting", "Waiting"],
    ["groups", "Groups"],
    ["timeline", "Timeline"],
    ["issued", "Collectives"],
    ["step", "Step"],
    ["stacks", "Stacks"],
    ["hardware", "Hardware"],
    ["evidence", "Evidence"],
    ["ranks", "Ranks"],
  ] as const;
  const there: Record<string, boolean> = {
    numbers: divergedTensors(page).length > 0,
    groups: page.layouts.length > 0,
    issued: page.tables.length > 0,
    step: page.step !== null,
    stacks: page.stacks.length > 0,
    hardware: page.hardware !== null,
    ranks: page.ranks.rank.length > 0,
  };
  return (
    <div class={selected === null ? "" : "with-panel"}>
      <Shell title="commlens" sections={sections.filter(([id]) => there[id] !== false)} tools={<CopyButton label="Copy the verdict for a ticket" text={page.text} bare />}>
        <Summary page={page} />
        <Numbers page={page} />
        <WaitGraph page={page} />
        <Groups page={page} selected={selected} />
        <Timeline page={page} selected={selected} />
        <Aligned page={page} />
        <Step page={page} />
        <Stacks page={page} />
        <Hardware page={page} />
        <Evidence page={page} />
        {page.ranks.rank.length > 0 && <AllRanks page={page} selected={selected} />}
      </Shell>
      {selected !== null && <RankPanel page={page} rank={selected} />}
    </div>
  );
}

start<VerdictPage>((page) => (page ? <Page page={page} /> : <p class="note">This page contains no verdict.</p>));
