import { useState } from "preact/hooks";
import { Icon } from "./icons";

type Theme = "light" | "dark";
const KEY = "commlens-theme";

function stored(): Theme | null {
  try {
    const value = localStorage.getItem(KEY);
    return value === "light" || value === "dark" ? value : null;
  } catch {
    return null; // this page has no storage
  }
}

/** The current theme: the reader's choice, else the system's. */
export function currentTheme(): Theme {
  return stored() ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
}

export function applyTheme(): void {
  const root = document.documentElement.dataset;
  const chosen = stored();
  if (chosen) root["theme"] = chosen;
  // Paper is white, so canvases are drawn for it.
  let before: string | undefined;
  addEventListener("beforeprint", () => {
    before = root["theme"];
    root["theme"] = "light";
    dispatchEvent(new Event("commlens-theme"));
  });
  addEventListener("afterprint", () => {
    if (before) root["theme"] = before;
    else delete root["theme"];
    dispatchEvent(new Event("commlens-theme"));
  });
}

/** Notify a listener whenever colours change, so that canvases are redrawn. */
export function onThemeChange(listener: () => void): () => void {
  const media = matchMedia("(prefers-color-scheme: dark)");
  media.addEventListener("change", listener);
  addEventListener("commlens-theme", listener);
  return () => {
    media.removeEventListener("change", listener);
    removeEventListener("commlens-theme", listener);
  };
}

/** Return a current colour of the stylesheet: `colour("--culprit")`. */
export function colour(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

export function ThemeSwitch() {
  const [theme, setTheme] = useState<Theme>(currentTheme());
  const other: Theme = theme === "dark" ? "light" : "dark";
  function change() {
    try {
      localStorage.setItem(KEY, other);
    } catch {
      // the choice applies to this page only
    }
    document.documentElement.dataset["theme"] = other;
    setTheme(other);
    dispatchEvent(new Event("commlens-theme"));
  }
  return (
    <button type="button" class="icon-button" onClick={change} aria-label={`Switch to the ${other} theme`} title={`Switch to the ${other} theme`}>
      <Icon name={theme === "dark" ? "sun" : "moon"} />
    </button>
  );
}
