import type { ComponentChild } from "preact";
import { useRef } from "preact/hooks";

export interface Tab {
  id: string;
  name: string;
  body: () => ComponentChild;
}

/** Tabs after the ARIA pattern: the arrow keys move, and only the chosen tab is in the tab order. */
export function Tabs({ tabs, chosen, onChoose, label }: { tabs: readonly Tab[]; chosen: string; onChoose: (id: string) => void; label: string }) {
  const list = useRef<HTMLDivElement>(null);
  const here = Math.max(0, tabs.findIndex((tab) => tab.id === chosen));
  function move(event: KeyboardEvent) {
    const steps: Record<string, number> = { ArrowRight: here + 1, ArrowLeft: here - 1, Home: 0, End: tabs.length - 1 };
    const to = steps[event.key];
    if (to === undefined) return;
    event.preventDefault();
    const next = (to + tabs.length) % tabs.length;
    onChoose(tabs[next]!.id);
    (list.current?.children[next] as HTMLElement | undefined)?.focus();
  }
  return (
    <>
      <div class="tabs" role="tablist" aria-label={label} ref={list} onKeyDown={move}>
        {tabs.map((tab, index) => (
          <button
            key={tab.id}
            type="button"
            role="tab"
            id={`tab-${tab.id}`}
            aria-selected={index === here}
            aria-controls={`panel-${tab.id}`}
            tabIndex={index === here ? 0 : -1}
            onClick={() => onChoose(tab.id)}
          >
            {tab.name}
          </button>
        ))}
      </div>
      <div role="tabpanel" id={`panel-${tabs[here]?.id}`} aria-labelledby={`tab-${tabs[here]?.id}`}>
        {tabs[here]?.body()}
      </div>
    </>
  );
}
