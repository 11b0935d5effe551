import { Icon } from "./icons";

interface SearchProps {
  value: string;
  onInput: (value: string) => void;
  label: string;
  /** The number of matches, in words. */
  found?: string;
  id?: string;
}

export function Search({ value, onInput, label, found, id }: SearchProps) {
  return (
    <div class="search" role="search">
      <Icon name="search" />
      <input
        id={id}
        type="search"
        value={value}
        placeholder={label}
        aria-label={label}
        spellcheck={false}
        autocomplete="off"
        onInput={(event) => onInput(event.currentTarget.value)}
        onKeyDown={(event) => {
          if (event.key === "Escape") onInput("");
        }}
      />
      {found !== undefined && <span class="search-found" role="status">{found}</span>}
    </div>
  );
}

/** Whether every word of the query is in the text, ignoring case. */
export function matches(text: string, query: string): boolean {
  const haystack = text.toLowerCase();
  return query.toLowerCase().split(/\s+/).every((word) => haystack.includes(word));
}
