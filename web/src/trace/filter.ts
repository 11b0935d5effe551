// The filter for collectives and ops, and its form in the address.

import { matches } from "../shared/search";
import { type Collective, PHASES, type Trace } from "./model";
import * as words from "./words";

export interface Filter {
  text: string;
  phases: ReadonlySet<number>;
  ops: ReadonlySet<string>;
  groups: ReadonlySet<string>;
  module: string;
  source: string;
  /** Minimum bytes on the wire of a collective. */
  least: number;
}

export const EVERYTHING: Filter = { text: "", phases: new Set(), ops: new Set(), groups: new Set(), module: "", source: "", least: 0 };

export function isActive(filter: Filter): boolean {
  return Boolean(filter.text || filter.phases.size || filter.ops.size || filter.groups.size || filter.module || filter.source || filter.least);
}

export type Facet = "phases" | "ops" | "groups";

/** Indices of the collectives that pass. One facet may be ignored, to count its other values. */
export function matching(trace: Trace, filter: Filter, without?: Facet): number[] {
  const { phases, ops, groups, module, source, least } = filter;
  const query = filter.text.trim();
  const sequence = /^#(\d+)$/.exec(query);
  const texts = new Map<number, boolean>();
  const sites = new Map<string | null, boolean>();
  const found: number[] = [];
  for (const event of trace.events) {
    if (without !== "phases" && phases.size && !phases.has(event.phase)) continue;
    if (without !== "ops" && ops.size && !ops.has(event.op)) continue;
    if (without !== "groups" && groups.size && !groups.has(trace.groupOf(event).label)) continue;
    if (least && event.wireBytes < least) continue;
    if (source && words.where(event.source) !== source) continue;
    if (module) {
      let inside = sites.get(event.site);
      if (inside === undefined) sites.set(event.site, (inside = words.pathMatches(event.site, module)));
      if (!inside) continue;
    }
    if (sequence) {
      if (event.sequence !== Number(sequence[1])) continue;
    } else if (query) {
      let about = texts.get(event.kind);
      if (about === undefined) texts.set(event.kind, (about = matches(textOf(trace, event), query)));
      if (!about) continue;
    }
    found.push(event.index);
  }
  return found;
}

/** The text to search, the same for all collectives of a kind. */
function textOf(trace: Trace, event: Collective): string {
  const { owner, cause, source } = event;
  return [
    event.site, event.op, event.api, trace.groupOf(event).label, PHASES[event.phase], event.dtype, words.sourceWords(event), source?.function,
    owner && `${owner.library} ${owner.name} ${owner.parameters.join(" ")}`, cause && `${words.causeWords(cause)} ${cause.op ?? ""}`,
  ].join(" ");
}

/** The kinds of tensor ops that pass. Filters on a group or a size apply only to collectives. */
export function opKindsShown(trace: Trace, filter: Filter, noise: number): boolean[] {
  const query = filter.text.trim();
  return trace.opKinds.map(
    (kind) =>
      kind.noise <= noise &&
      (!filter.phases.size || filter.phases.has(kind.phase)) &&
      (!filter.module || words.pathMatches(kind.site, filter.module)) &&
      (!query || matches(`${kind.site ?? ""} ${kind.name} ${kind.placements.join(" ")} ${PHASES[kind.phase]}`, query)),
  );
}

/** The rest of the address after the #. */
export interface View {
  noise: number;
  folded: boolean;
  collective: number | null;
}

export const USUAL: View = { noise: 1, folded: true, collective: null };

export function toAddress(filter: Filter, view: View): string {
  const parts = new URLSearchParams();
  if (filter.module) parts.set("module", filter.module);
  for (const phase of filter.phases) parts.append("phase", PHASES[phase]!);
  for (const op of filter.ops) parts.append("op", op);
  for (const group of filter.groups) parts.append("group", group);
  if (filter.source) parts.set("source", filter.source);
  if (filter.least) parts.set("least", String(filter.least));
  if (filter.text) parts.set("q", filter.text);
  if (view.noise !== USUAL.noise) parts.set("noise", String(view.noise));
  if (!view.folded) parts.set("fold", "no");
  if (view.collective !== null) parts.set("collective", String(view.collective));
  return parts.toString();
}

export function fromAddress(address: string): { filter: Filter; view: View } {
  const parts = new URLSearchParams(address);
  const values = (name: string) => new Set(parts.getAll(name).filter(Boolean));
  const number = (name: string, otherwise: number) => {
    const value = Number(parts.get(name) ?? NaN);
    return Number.isFinite(value) ? value : otherwise;
  };
  return {
    filter: {
      text: parts.get("q") ?? "",
      phases: new Set([...values("phase")].map((name) => PHASES.indexOf(name as (typeof PHASES)[number])).filter((phase) => phase >= 0)),
      ops: values("op"),
      groups: values("group"),
      module: parts.get("module") ?? "",
      source: parts.get("source") ?? "",
      least: Math.max(0, number("least", 0)),
    },
    view: {
      noise: Math.min(3, Math.max(0, Math.round(number("noise", USUAL.noise)))),
      folded: parts.get("fold") !== "no",
      collective: parts.has("collective") ? number("collective", 0) : null,
    },
  };
}
