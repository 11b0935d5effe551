import { type ComponentChild, render } from "preact";
import { embedded } from "./data";
import { applyTheme } from "./theme";

/** Read the page's data and show it. An error is shown above the plain text, which stays. */
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
      note.textContent = `This browser could not show the whole page (${String(error)}). A summary follows as text.`;
      place.prepend(note);
    },
  );
}

/** Scroll to the address's anchor: the browser looked for it before the content existed. */
function followAnchor(): void {
  const id = decodeURIComponent(location.hash.slice(1));
  if (id) document.getElementById(id)?.scrollIntoView();
}
