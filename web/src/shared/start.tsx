import { type ComponentChild, render } from "preact";
import { embedded } from "./data";
import { applyTheme } from "./theme";

/** Read the page's data and show it. What goes wrong is said above the plain text, which stays. */
export function start<T>(view: (data: T | null) => ComponentChild): void {
  applyTheme();
  const place = document.getElementById("app");
  if (!place) return;
  embedded<T>().then(
    (data) => {
      const shown = view(data);
      place.replaceChildren();
      render(shown, place);
      followAnchor();
    },
    (error: unknown) => {
      const note = document.createElement("p");
      note.className = "note";
      note.textContent = `This browser could not show the whole page (${String(error)}). What matters most follows as text.`;
      place.prepend(note);
    },
  );
}

/** The browser looked for the address's anchor before the content was there. */
function followAnchor(): void {
  const id = decodeURIComponent(location.hash.slice(1));
  if (id) document.getElementById(id)?.scrollIntoView();
}
