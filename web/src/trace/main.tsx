import "../shared/base.css";
import "./trace.css";
import { render } from "preact";
import { applyTheme } from "../shared/theme";
import { App } from "./app";
import { readEmbedded } from "./read";

applyTheme();
const place = document.getElementById("app");
if (place) void show(place);

// In a frame without an address of its own (a notebook's cell), a link to a section would leave the page.
addEventListener("click", (event) => {
  const link = event.target instanceof Element ? event.target.closest('a[href^="#"]') : null;
  if (!link || location.protocol !== "about:") return;
  event.preventDefault();
  document.getElementById(link.getAttribute("href")!.slice(1))?.scrollIntoView();
});

/** Show the page's trace once it is read; until then, or if that fails, the plain text remains. */
async function show(place: HTMLElement): Promise<void> {
  const bar = document.createElement("progress");
  bar.className = "loading";
  bar.setAttribute("aria-label", "Reading the trace");
  const progress = (share: number) => {
    if (!bar.isConnected) document.body.prepend(bar);
    if (share) bar.value = share;
    if (share >= 1) bar.remove();
  };
  try {
    const carried = await readEmbedded(progress);
    const section = location.hash.slice(1);
    place.replaceChildren();
    render(<App carried={carried} progress={progress} />, place);
    if (section && !section.includes("=")) document.getElementById(section)?.scrollIntoView();
  } catch (error) {
    const note = document.createElement("p");
    note.className = "note";
    note.textContent = `This browser could not show the whole page (${String(error)}). The summary follows as text.`;
    place.prepend(note);
  }
  bar.remove();
}
