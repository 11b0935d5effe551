import { useState } from "preact/hooks";
import { Icon } from "./icons";

/** Copy text to the clipboard; false if the browser refuses. */
export async function copyText(text: string): Promise<boolean> {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = document.createElement("textarea");
    area.value = text;
    area.className = "off-screen";
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}

interface CopyButtonProps {
  text: string | (() => string);
  label: string;
  /** Shown without its label. */
  bare?: boolean;
}

/** A button that copies and confirms it. */
export function CopyButton({ text, label, bare }: CopyButtonProps) {
  const [said, setSaid] = useState<"" | "Copied" | "Not allowed by the browser">("");
  async function copy() {
    setSaid((await copyText(typeof text === "function" ? text() : text)) ? "Copied" : "Not allowed by the browser");
    setTimeout(() => setSaid(""), 2000);
  }
  return (
    <button type="button" class={bare ? "icon-button" : "button"} onClick={copy} aria-label={bare ? label : undefined} title={bare ? label : undefined}>
      <Icon name={said === "Copied" ? "check" : "copy"} />
      {!bare && <span>{said || label}</span>}
      <span class="off-screen" role="status">{said}</span>
    </button>
  );
}
