// Converts the JSON of CommDebugMode's generate_json_dump, torch's or ours, to a trace, by the rules of formats/comm_debug_json.py.

import { Builder, type Trace, list, record, text } from "./model";

const FUNCTIONAL: Record<string, string> = {
  all_gather_into_tensor: "all_gather",
  reduce_scatter_tensor: "reduce_scatter",
  all_to_all_single: "all_to_all",
  shard_dim_alltoall: "all_to_all",
  allreduce: "all_reduce",
  allgather: "all_gather",
  _allgather_base: "all_gather",
  allgather_into_tensor: "all_gather",
  _reduce_scatter_base: "reduce_scatter",
  alltoall: "all_to_all",
  alltoall_base: "all_to_all",
  recv_any_source: "recv",
  gather_into_tensor: "gather",
};
const UNKNOWN =
  "This trace is from CommDebugMode's JSON, which holds only counts by module: bytes, groups, order, times, steps, owners, causes and " +
  "lines of code are unknown. Counts of a module that are not its children's are taken as its own.";
const COLLECTIVES = [
  ["forward", "collectives_forward"],
  ["backward", "collectives_backward"],
  ["recomputation", "collectives_checkpointing"],
  ["optimizer", "collectives_optimizer"],
  [null, "collectives_unclassified"],
] as const;
const OPERATIONS = [
  ["forward", "operations_forward"],
  ["backward", "operations_backward"],
  ["recomputation", "operations_checkpointing"],
  ["optimizer", "operations_optimizer"],
] as const;

type Section = Record<string, unknown>;

/** Create a trace with one summarised event per module, phase and op. */
export function convert(root: Section): Trace {
  const builder = new Builder();
  builder.group({ name: "unknown", description: "unknown", ranks: [] });
  // A module called several times is repeated with all its children, once per call: the first one has everything.
  const seen = new Set<string>();
  const waiting: Section[] = [root];
  let total = 0;
  for (let section = waiting.pop(); section; section = waiting.pop()) {
    const path = text(section["fqn"]);
    if (seen.has(path)) continue;
    seen.add(path);
    const site = path === "Global" ? null : path;
    if (site !== null) builder.module({ path, type: typeOf(section), parameters: parametersOf(section) });
    const children = [...new Map(list(section["children"]).map(record).reverse().map((child) => [text(child["fqn"]), child])).values()];
    total += collectives(builder, section, children, site);
    operations(builder, section, site);
    waiting.push(...children);
  }
  builder.meta("coverage", { dispatched: total, recorded: total, unclassified: 0, blind: [UNKNOWN] });
  return builder.finish();
}

function typeOf(section: Section): string {
  return text(section["module_type"]).replace(/^class '/, "").replace(/'$/, "");
}

function parametersOf(section: Section): object[] {
  return list(section["parameters"]).map(list).map(([name, placements]) => ({ name, placements: typeof placements === "string" ? placements : JSON.stringify(placements) ?? "" }));
}

function collectives(builder: Builder, section: Section, children: Section[], site: string | null): number {
  let total = 0;
  for (const [phase, field] of COLLECTIVES) {
    const below = new Map<string, number>();
    for (const child of children) for (const [name, number] of counts(child[field])) below.set(name, (below.get(name) ?? 0) + number);
    for (const [name, number] of counts(section[field])) {
      const own = number - (below.get(name) ?? 0);
      if (own <= 0) continue;
      total += own;
      // Counts outside all modules: CommDebugMode calls them forward even in the optimizer.
      const known = site === null && phase === "forward" ? null : phase;
      builder.event({ sequence: builder.trace.events.length + 1, op: wireOp(name), api: name, phase: known, group: 0, site, count: own });
    }
  }
  return total;
}

function counts(value: unknown): [string, number][] {
  return list(value).map(list).map(([name, number]) => [text(name), typeof number === "number" ? number : 0]);
}

export function wireOp(name: string): string {
  const own = name.split(".").at(-1)!.replace(/_$/, "").replace(/_out$/, "").replace(/_coalesced$/, "").replace(/_autograd$/, "");
  return FUNCTIONAL[own] ?? own;
}

function operations(builder: Builder, section: Section, site: string | null): void {
  for (const [phase, field] of OPERATIONS) {
    for (const op of list(section[field]).map(record)) {
      builder.op({
        name: op["name"],
        phase,
        site,
        input_shapes: list(op["input_shape"]).map((shape) => (String(shape).match(/\d+/g) ?? []).map(Number)),
        input_placements: list(op["input_sharding"]).map(String),
        mesh: op["device_mesh"] ? String(op["device_mesh"]) : "",
      });
    }
  }
}
