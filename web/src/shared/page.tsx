import type { ComponentChildren } from "preact";
import { useEffect, useState } from "preact/hooks";
import { Icon } from "./icons";
import { ThemeSwitch } from "./theme";

interface ShellProps {
  title: string;
  /** The sections in order: id and name. */
  sections: readonly (readonly [id: string, name: string])[];
  /** Buttons beside the theme switch. */
  tools?: ComponentChildren;
  children: ComponentChildren;
}

/** The frame of every page: a bar with links to the sections, and the content. */
export function Shell({ title, sections, tools, children }: ShellProps) {
  const here = useSectionInView(sections.map(([id]) => id));
  return (
    <>
      <a class="skip" href="#content">Skip to the content</a>
      <header class="bar">
        <span class="brand"><Mark />{title}</span>
        <nav aria-label="Sections">
          {sections.map(([id, name]) => (
            <a key={id} href={`#${id}`} aria-current={here === id ? "true" : undefined}>{name}</a>
          ))}
        </nav>
        <span class="tools">
          {tools}
          <button type="button" class="icon-button" onClick={() => print()} aria-label="Print" title="Print"><Icon name="print" /></button>
          <ThemeSwitch />
        </span>
      </header>
      <main id="content" tabIndex={-1}>{children}</main>
    </>
  );
}

function Mark() {
  return (
    <svg class="mark" viewBox="0 0 16 16" width="18" height="18" aria-hidden="true">
      <path d="M3 4.5h10M3 8h10M3 11.5h5" />
      <circle cx="12" cy="11.5" r="2" />
    </svg>
  );
}

function useSectionInView(ids: string[]): string {
  const [here, setHere] = useState("");
  const all = ids.join(" ");
  useEffect(() => {
    let waiting = false;
    const look = () => {
      waiting = false;
      let found = "";
      for (const id of all.split(" ")) {
        const element = document.getElementById(id);
        if (element && element.getBoundingClientRect().top < 140) found = id;
      }
      setHere(found);
    };
    const soon = () => {
      if (!waiting) requestAnimationFrame(look);
      waiting = true;
    };
    addEventListener("scroll", soon, { passive: true });
    look();
    return () => removeEventListener("scroll", soon);
  }, [all]);
  return here;
}

interface SectionProps {
  id: string;
  title: string;
  /** One sentence that explains the section. */
  about?: ComponentChildren;
  tools?: ComponentChildren;
  children: ComponentChildren;
}

export function Section({ id, title, about, tools, children }: SectionProps) {
  return (
    <section id={id} aria-labelledby={`${id}-title`}>
      <div class="section-head">
        <h2 id={`${id}-title`}>{title}</h2>
        {tools}
      </div>
      {about && <p class="about">{about}</p>}
      {children}
    </section>
  );
}
