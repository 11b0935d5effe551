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
import { nameWorlds } from "./parts";
import { AllRanks, RankPanel } from "./ranks";
import { Stacks } from "./stacks";
import { Step } from "./step";
import { Summary } from "./summary";
import { Aligned } from "./table";
import { Timeline } from "./timeline";

function Page({ page }: { page: VerdictPage }) {
  const asked = /^rank-(\d+)$/.exec(useAnchor());
  const selected = asked ? Number(asked[1]) : null;
  const sections = ([
    ["verdict", "Verdict", true],
    ["numbers", "Tensors", divergedTensors(page).length],
    ["waiting", "Waiting", page.graph.nodes.length],
    ["groups", "Groups", page.layouts.length],
    ["timeline", "Timeline", page.timeline.lanes.length],
    ["issued", "Collectives", page.tables.length],
    ["step", "Step", page.step],
    ["stacks", "Stacks", page.stacks.length],
    ["hardware", "Hardware", page.hardware],
    ["evidence", "Evidence", true],
    ["ranks", "Ranks", page.ranks.rank.length],
  ] as const).flatMap(([id, name, there]) => (there ? [[id, name] as const] : []));
  return (
    <div class={selected === null ? "" : "with-panel"}>
      <Shell title="commlens" sections={sections} tools={<CopyButton label="Copy the verdict for a ticket" text={page.text} bare />}>
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

start<VerdictPage>((page) => {
  if (!page) return <p class="note">This page contains no verdict.</p>;
  nameWorlds(page.verdict.worlds);
  return <Page page={page} />;
});
