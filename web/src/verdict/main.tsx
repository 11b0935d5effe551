import "../shared/base.css";
import { start } from "../shared/start";
import { Shell } from "../shared/page";
import { CopyButton } from "../shared/copy";

interface VerdictPage {
  text: string;
}

start<VerdictPage>((data) => (
  <Shell title="commlens" sections={[]} tools={<CopyButton label="Copy for a ticket" text={data?.text ?? ""} />}>
    <pre>{data?.text}</pre>
  </Shell>
));
