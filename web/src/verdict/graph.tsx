import { Graph, layout } from "@dagrejs/dagre";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { Breakable } from "../shared/breakable";
import { Section } from "../shared/page";
import { Sideways } from "../shared/sideways";
import { capital } from "../shared/words";
import type { GraphEdge, VerdictPage } from "./data";
import { RankSet, RoleChip, isOne, ranksPhrase } from "./parts";

const AROUND = 34; // the border, padding and margin of the graph, in pixels
const LAYOUTS: readonly ["LR" | "TB", "" | "compact" | "tight"][] = [["LR", ""], ["LR", "compact"], ["TB", ""], ["TB", "compact"], ["TB", "tight"]];

interface Placed {
  width: number;
  height: number;
  nodes: { x: number; y: number }[];
  edges: { path: string; x: number; y: number }[];
}

/** The wait-for graph. Nodes are classes of ranks; they are laid out once their sizes are known. */
export function WaitGraph({ page }: { page: VerdictPage }) {
  const { nodes, edges } = page.graph;
  const frame = useRef<HTMLDivElement>(null);
  const box = useRef<HTMLDivElement>(null);
  const [placed, setPlaced] = useState<Placed | null>(null);
  const [room, setRoom] = useState(0);
  useEffect(() => {
    const element = frame.current;
    if (!element) return;
    const observer = new ResizeObserver(() => setRoom(element.clientWidth));
    observer.observe(element);
    return () => observer.disconnect();
  }, []);
  useLayoutEffect(() => {
    const element = box.current;
    if (!element || nodes.length === 0 || room === 0) return;
    const sizes = (selector: string) => [...element.querySelectorAll<HTMLElement>(selector)].map((each) => ({ width: each.offsetWidth, height: each.offsetHeight }));
    // From left to right if there is room, perhaps with narrower boxes; else from top to bottom, with boxes as wide as fit.
    let placed: Placed | null = null;
    for (const [direction, width] of LAYOUTS) {
      element.classList.remove("compact", "tight");
      if (width) element.classList.add(width);
      placed = place(page, { nodes: sizes(".node"), labels: sizes(".edge-label") }, direction);
      if (placed.width <= room - AROUND) break;
    }
    setPlaced(placed);
  }, [page, room]);
  if (nodes.length === 0) return null;
  return (
    <Section id="waiting" title="Wait-for graph" about="An arrow points from waiting ranks to the ranks that they wait for. Ranks that do the same share a box.">
      <div ref={frame}>
        <Sideways class="graph-scroll" style={placed ? { maxWidth: `${placed.width + AROUND}px` } : {}} label="The wait-for graph; its content as text follows below">
          <div class="graph" ref={box} style={placed ? { height: `${placed.height}px`, minWidth: `${placed.width}px` } : { visibility: "hidden" }}>
            {placed && (
              <svg class="graph-edges" width={placed.width} height={placed.height} aria-hidden="true">
                <defs>
                  <marker id="arrow" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" markerHeight="8" orient="auto-start-reverse">
                    <path d="M0 1.5 9 5 0 8.5z" />
                  </marker>
                </defs>
                {placed.edges.map((edge, index) => <path key={index} class="edge" d={edge.path} marker-end="url(#arrow)" />)}
              </svg>
            )}
            {edges.map((edge, index) => (
              <div key={`edge${index}`} class="edge-label" title={waits(edge)} style={at(placed?.edges[index])}><Breakable text={edge.parted ? `${capital(ranksPhrase(edge.waiting))}: ${edge.label}` : edge.label} /></div>
            ))}
            {nodes.map((node, index) => (
              <div key={`node${index}`} class={`node ${node.root ? "root" : ""} ${node.cls >= 0 ? `node-${page.classes[node.cls]!.role}` : "node-end"}`} style={at(placed?.nodes[index])}>
                {node.cls >= 0 ? <ClassText page={page} cls={node.cls} /> : (
                  <>
                    <strong>{node.title}</strong>
                    {node.lines.map((line, number) => <div key={number}><Breakable text={line} /></div>)}
                  </>
                )}
              </div>
            ))}
          </div>
        </Sideways>
      </div>
      <ul class="off-screen">
        {edges.map((edge, index) => <li key={index}>{`${waits(edge)}${nameOf(page, edge.target)}.`}</li>)}
      </ul>
    </Section>
  );
}

export function ClassText({ page, cls }: { page: VerdictPage; cls: number }) {
  const known = page.classes[cls]!;
  return (
    <>
      <div class="node-head"><strong><RankSet ranks={known.ranks} /></strong><RoleChip role={known.role} /></div>
      <div><Breakable text={known.doing} /></div>
      {known.place && <div class="mono node-place"><Breakable text={known.place} /></div>}
      {known.detail && <div class="dim">{known.detail}</div>}
    </>
  );
}

/** `Rank 2 waits in all_reduce #7 of dp`. */
function waits(edge: GraphEdge): string {
  return `${capital(ranksPhrase(edge.waiting))} ${isOne(edge.waiting) ? "waits" : "wait"} in ${edge.label}`;
}

/** ` for rank 3, which is in train.py:57`, `: 2 ranks arrived, none has completed it`. */
function nameOf(page: VerdictPage, index: number): string {
  const node = page.graph.nodes[index]!;
  return node.cls >= 0 ? ` for ${ranksPhrase(page.classes[node.cls]!.ranks)}, which ${page.classes[node.cls]!.doing}` : `: ${node.title}`;
}

function at(point: { x: number; y: number } | undefined): { left?: string; top?: string } {
  return point ? { left: `${Math.round(point.x)}px`, top: `${Math.round(point.y)}px` } : {};
}

interface Sizes {
  nodes: { width: number; height: number }[];
  labels: { width: number; height: number }[];
}

function place(page: VerdictPage, sizes: Sizes, direction: "LR" | "TB"): Placed {
  const graph = new Graph({ multigraph: true });
  graph.setGraph({ rankdir: direction, nodesep: 28, ranksep: direction === "LR" ? 26 : 34, edgesep: 16, marginx: 2, marginy: 2 });
  graph.setDefaultEdgeLabel(() => ({}));
  page.graph.nodes.forEach((_, index) => graph.setNode(String(index), { ...sizes.nodes[index] }));
  page.graph.edges.forEach((edge, index) => graph.setEdge(String(edge.source), String(edge.target), { ...sizes.labels[index], labelpos: "c" }, String(index)));
  layout(graph);
  const whole = graph.graph() as { width?: number; height?: number };
  const nodes = page.graph.nodes.map((_, index) => {
    const node = graph.node(String(index)) as { x: number; y: number; width: number; height: number };
    return { x: node.x - node.width / 2, y: node.y - node.height / 2 };
  });
  const edges = page.graph.edges.map((edge, index) => {
    const found = graph.edge({ v: String(edge.source), w: String(edge.target), name: String(index) }) as { points: { x: number; y: number }[]; x: number; y: number };
    const size = sizes.labels[index]!;
    return { path: curve(found.points), x: found.x - size.width / 2, y: found.y - size.height / 2 };
  });
  return { width: Math.ceil(whole.width ?? 0), height: Math.ceil(whole.height ?? 0), nodes, edges };
}

/** A smooth line through the points: quadratic curves between the middles of its pieces. */
function curve(points: { x: number; y: number }[]): string {
  const [first, ...rest] = points;
  if (!first) return "";
  let path = `M${first.x} ${first.y}`;
  rest.forEach((point, index) => {
    const next = rest[index + 1];
    path += next ? `Q${point.x} ${point.y} ${(point.x + next.x) / 2} ${(point.y + next.y) / 2}` : `L${point.x} ${point.y}`;
  });
  return path;
}
