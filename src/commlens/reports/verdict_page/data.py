"""The content of the verdict's page as data. ``web/src/verdict/data.ts`` has the same fields.

Everything is folded and bounded here, so that a page of 4096 ranks opens as quickly as one of four:
ranks that do the same are one class, and ranks are written as sets (``"0-1,3"``).
"""

from __future__ import annotations

from typing import Literal

import msgspec

from commlens.model.verdict import Verdict
from commlens.reports.step_table import StepTable

Role = Literal["culprit", "victim", "awaited", "involved", "unknown", "none"]
"""``awaited``: the others wait for it, without evidence of a fault. ``involved``: named by a
finding that is not a root cause. ``unknown``: it left no record.
"""

ROLES: tuple[Role, ...] = ("culprit", "awaited", "involved", "victim", "unknown", "none")
"""In the order in which they are shown."""

CellState = Literal["completed", "in-flight", "failed", "unknown", "absent", "overwritten"]


class RankClass(msgspec.Struct, kw_only=True):
    """Ranks that do the same thing."""

    ranks: str
    count: int
    role: Role
    doing: str  # "wait in all_reduce #41 of dp"; of one rank "waits in ..."
    each: str = ""  # the same in the singular
    place: str = ""  # "train.py:81 step"
    detail: str = ""  # "for 31 s, float32[1048576] SUM"


class GraphNode(msgspec.Struct, kw_only=True):
    """A class of ranks, or an end of waiting that is not a rank: all ranks have arrived, or the
    ranks that met disagree.
    """

    cls: int = -1  # index of the class
    title: str = ""
    lines: list[str] = []
    root: bool = False


class GraphEdge(msgspec.Struct, kw_only=True):
    """Ranks of one node wait for ranks of another."""

    source: int
    target: int
    label: str  # the collectives
    waiting: str  # the ranks
    parted: bool = False  # other ranks of the source wait for another node


class WaitGraph(msgspec.Struct):
    """The wait-for graph of the classes."""

    nodes: list[GraphNode] = []
    edges: list[GraphEdge] = []


class LayoutRow(msgspec.Struct):
    """One group of ranks, in the group's order."""

    name: str
    ranks: list[int]
    fault: bool = False


class Layout(msgspec.Struct):
    """All ranks as a grid: its rows are the groups of one mesh dimension, or the hosts."""

    name: str
    about: str
    rows: list[LayoutRow]


class ChannelRef(msgspec.Struct):
    """A process group on one device type."""

    label: str
    ranks: str


class Ops(msgspec.Struct):
    """The last collectives of one rank, as columns. Times are µs after the moment 0; -1
    is unknown or not yet.
    """

    start: list[int] = []
    end: list[int] = []
    channel: list[int] = []
    number: list[int] = []
    name: list[int] = []  # index into texts, as are the next two
    asked: list[int] = []
    place: list[int] = []
    # 0 completed, 1 in flight, 2 failed, 3 not known whether it completed, 4 completed at some
    # moment up to its end
    state: list[int] = []


class Lane(msgspec.Struct):
    """One rank on the timeline."""

    rank: int
    role: Role
    ops: Ops


class Arrivals(msgspec.Struct):
    """The times at which the ranks reached one collective."""

    label: str
    channel: int
    ranks: list[int]
    at: list[int]  # µs, ascending
    absent: str = ""  # ranks that did not reach it


class Timeline(msgspec.Struct):
    """The collectives of each rank over time."""

    # µs: when the records were copied or, if that is unknown, the latest time in them
    captured: int = 0
    captured_known: bool = True
    zero_is: str = ""  # what happened at 0: "the last collective was issued"
    window: tuple[int, int] = (0, 0)  # µs: around 0
    channels: list[ChannelRef] = []
    texts: list[str] = []
    lanes: list[Lane] = []
    left_out: int = 0  # ranks without a lane
    arrivals: list[Arrivals] = []
    notes: list[str] = []


class Cell(msgspec.Struct, omit_defaults=True):
    """The collective of a class of ranks under one number."""

    op: str
    what: str = ""
    place: str = ""
    state: CellState = "completed"
    differs: bool = False
    late: str = ""  # "31 ms after the first"


class TableColumn(msgspec.Struct):
    """Ranks with the same cells."""

    ranks: str
    role: Role


class TableRow(msgspec.Struct):
    """One sequence number."""

    number: str
    cells: list[Cell]
    fault: bool = False
    note: str = ""


class Table(msgspec.Struct):
    """The collectives around the fault, side by side."""

    name: str
    about: str
    columns: list[TableColumn]
    rows: list[TableRow]
    left_out: str = ""


class FrameRef(msgspec.Struct):
    """A line of a stack."""

    function: str
    place: str  # "train.py:57"
    file: str  # with its folder
    kind: str


class StackClass(msgspec.Struct):
    """Threads with the same stack."""

    ranks: str
    count: int
    role: Role
    thread: str  # "main thread"
    frames: list[FrameRef]  # innermost first
    note: str = ""


class Ranks(msgspec.Struct):
    """All ranks, as columns; text is an index into :attr:`texts`."""

    texts: list[str] = []
    rank: list[int] = []
    role: list[Role] = []
    cls: list[int] = []
    host: list[int] = []
    pid: list[int] = []
    steps: list[int] = []
    issued: list[int] = []
    last: list[int] = []  # its last collective
    end: list[int] = []  # the state of its process
    stack: list[int] = []  # index into the stacks; -1: none
    source: list[int] = []  # the file


class SourceLines(msgspec.Struct):
    """The lines of source around one."""

    first: int  # number of the first one
    line: int  # number of the one that matters
    lines: list[str]


class OtherLine(msgspec.Struct):
    """In a mismatch: the line at which the ranks other than the culprits issued the collective."""

    ranks: str
    place: str  # "/home/me/train.py:26 average_gradients"
    source: SourceLines | None = None


HardwareMark = Literal["explains", "coincides", ""]
"""Whether a change is the reason that the verdict names, or happened at the time of the fault."""


class HardwareChange(msgspec.Struct):
    """A change of a node's hardware."""

    node: str
    ranks: str  # that run there
    at: str  # UTC
    since: str  # it happened after that; empty: at that time exactly
    what: str
    mark: HardwareMark = ""


class HardwareTable(msgspec.Struct):
    """The changes of all nodes, in the order of their times."""

    changes: list[HardwareChange]
    left_out: str = ""


class VerdictPage(msgspec.Struct, kw_only=True):
    """The page."""

    commlens: str
    verdict: Verdict
    text: str  # for a ticket
    restart: str  # whether to start the job again, in a clause; empty: not known
    facts: list[tuple[str, str]]  # "Script": "train.py", ...
    ranks: Ranks
    classes: list[RankClass]
    graph: WaitGraph
    layouts: list[Layout]
    timeline: Timeline
    tables: list[Table]
    stacks: list[StackClass]
    # where the communication time of a step goes, if the records tell
    step: StepTable | None = None
    source: SourceLines | None = None  # of the culprit
    others: OtherLine | None = None
    hardware: HardwareTable | None = None  # None: nothing changed, or nothing is known
