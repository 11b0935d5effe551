"""Random programs of pieces with one fault, as the soak's, but run by builders.Job: thousands of
them take a minute.

A piece is a collective on the world, on a second group, on halves or on every second rank, DDP,
FSDP, tensor parallelism, a pipeline, a ring, a save or an evaluation. It comes in every step or
every few, and some repeat as an inner loop.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from builders import SCRIPT, Action, Job, Stay, Step, collective, recv, send

from commlens.model.collective import Collective, Frame, ProcessGroup

PLAIN = (
    "all_reduce",
    "all_gather",
    "broadcast",
    "reduce",
    "reduce_scatter",
    "gather",
    "all_to_all",
    "barrier",
)
ROOTED = ("broadcast", "reduce", "gather")
HISTORY = 3  # steps after which a rank has a routine
LOOP = (Frame(SCRIPT, 880, "main"), Frame(SCRIPT, 900, "<module>"))


@dataclass
class Piece:
    """A part of a step. ``variants``: how one rank's call can differ."""

    kind: str
    number: int
    group: str = "world"
    size: int = 8
    every: int = 1
    rounds: int = 1
    variants: tuple[str, ...] = ()


@dataclass
class RandomProgram:
    """``odd`` ranks have the fault in one round of one piece in one step."""

    size: int
    pieces: list[Piece]
    fault: str
    number: int
    odd: tuple[int, ...]
    step: int
    round: int
    steps: int
    new_line: bool  # whether an extra call comes from a line of its own

    def __call__(self, job: Job, rank: int) -> Iterator[Action]:
        for step in range(self.steps):
            for piece in self.pieces:
                for number in range(piece.rounds if step % piece.every == piece.every - 1 else 0):
                    here = rank in self.odd and (step, number, piece.number) == (
                        self.step,
                        self.round,
                        self.number,
                    )
                    callers = (Frame(SCRIPT, 800 + 3 * piece.number, "train_step"), *LOOP)
                    if here and self.fault == "sleep":
                        yield Stay(57, "load_batch")
                    if not here or self.fault != "skip":
                        yield from calls(job, rank, piece, callers, self.fault if here else "")
                    if here and self.fault == "extra":
                        other = Frame(SCRIPT, 800 + 3 * piece.number + self.new_line, "train_step")
                        yield from calls(job, rank, piece, (other, *LOOP))


class GlooJob(Job):
    """A send, a gather and a broadcast's root wait for the other side, as gloo's do."""

    def _fits(self, rank: int, op: Collective) -> bool:
        met = self.met[(op.channel.key, op.sequence_number)]
        root = op.args.root
        if op.op == "gather" and rank != root:
            return root in met and (met[root].op, met[root].args.inputs) == (op.op, op.args.inputs)
        if op.op == "broadcast":
            arrived = root in met and met[root].args == op.args
            return arrived and (rank != root or set(met) == set(op.channel.group.ranks))
        return super()._fits(rank, op)


def group_of(job: Job, rank: int, name: str) -> ProcessGroup:
    half = job.size // 2
    return {
        "world": lambda: job.world,
        "again": lambda: job.group("1", range(job.size), "again"),
        "halves": lambda: (
            job.group("2", range(half), "undefined")
            if rank < half
            else job.group("3", range(half, job.size), "undefined")
        ),
        "parity": lambda: job.group(str(4 + rank % 2), range(rank % 2, job.size, 2), "undefined"),
    }[name]()


def calls(
    job: Job, rank: int, piece: Piece, callers: tuple[Frame, ...], odd: str = ""
) -> Iterator[Action]:
    """Yield the actions of one round of a piece."""
    line, group = 100 * (piece.number + 1), group_of(job, rank, piece.group)

    def call(op: str, size: int, at: int, **more: object) -> Action:
        reduce_op = ("MAX" if odd == "reduce-op" else "SUM") if "reduce" in op else None
        return collective(
            op,
            group,
            size,
            line=line + at,
            function=piece.kind,
            callers=callers,
            reduce_op=reduce_op,
            **more,
        )  # type: ignore[arg-type]

    def message(which: object, peer: int, at: int, tag: int) -> Action:
        return replace(
            which(job.world, peer, 6, line=line + at, tag=tag), callers=callers, function=piece.kind
        )  # type: ignore[operator]

    if piece.kind in PLAIN and odd == "op":
        yield call("all_reduce" if piece.kind == "all_gather" else "all_gather", 5, 1)
    elif piece.kind in PLAIN:
        root = group.ranks[odd == "root"] if piece.kind in ROOTED else None
        yield call(
            piece.kind,
            piece.size + 3 * (odd == "shape"),
            2,
            dtype="float64" if odd == "dtype" else "float32",
            root=root,
        )
    elif piece.kind == "ddp":
        yield call("all_reduce", 600, 3, cpp=True)
        yield Step()
    elif piece.kind == "fsdp":
        for op, at in (
            ("all_gather", 2),
            ("all_gather", 2),
            ("reduce_scatter", 3),
            ("reduce_scatter", 3),
        ):
            yield call(op, 136, at)
        yield Step()
    elif piece.kind == "tp":
        yield call("all_reduce", 32, 2)
        yield call("all_reduce", 128, 3)
        yield Step()
    elif piece.kind == "evaluate":
        yield call("all_reduce", 2, 3)
        yield call("broadcast", 2, 4, root=0)
    elif piece.kind == "ring":
        yield message(send, (rank + (2 if odd == "p2p" else 1)) % job.size, 2, 0)
        yield message(recv, (rank - 1) % job.size, 2, 0)
    else:  # a pipeline
        if rank:
            yield message(recv, rank - 1, 3, 3)
        if rank < job.size - 1:
            yield message(send, rank + 1, 5, 4 if odd == "p2p" else 3)
            yield message(recv, rank + 1, 8, 5)
        if rank:
            yield message(send, rank - 1, 10, 5)


def draw_piece(rng: random.Random, size: int, number: int, *, loops: bool) -> Piece:
    kind = rng.choice([*PLAIN, "ddp", "fsdp", "tp", "pipeline", "ring", "evaluate"])
    piece = Piece(
        kind, number, every=rng.choice([1, 1, 3]), rounds=rng.choice([1, 4, 5, 7]) if loops else 1
    )
    if kind in PLAIN:
        piece.group = rng.choice(
            ["world", "again", *(["halves", "parity"] if size >= 4 and size % 2 == 0 else [])]
        )
        kinds = {
            "shape": kind not in ("barrier", "all_to_all"),
            "dtype": kind != "barrier",
            "reduce-op": "reduce" in kind,
        }
        piece.variants = (
            "op",
            *(name for name, possible in (kinds | {"root": kind in ROOTED}).items() if possible),
        )
    elif kind == "evaluate":
        piece.every = rng.choice([2, 3])
    elif kind in ("pipeline", "ring") and size > 2:
        piece.variants = ("p2p",) if kind == "ring" or not loops else ()
    return piece


def draw_program(seed: int, *, halves: bool = False) -> RandomProgram:
    """Draw a program.

    Args:
        seed: of the random numbers.
        halves: whether half of the ranks have the fault, in the first step, often in an inner loop
            of four rounds or more.
    """
    rng = random.Random(seed)
    size = rng.choice([2, 4, 4, 6, 8] if halves else [2, 2, 3, 4, 4, 5, 6])
    pieces = [
        draw_piece(rng, size, number, loops=halves) for number in range(rng.choice([1, 2, 3, 4]))
    ]
    if all(piece.every > 1 for piece in pieces):
        pieces[0].every = 1
    piece, steps = rng.choice(pieces), rng.randint(8, 12)
    variants = tuple(name for name in piece.variants if not (halves and name == "p2p"))
    fault = rng.choice(
        ["skip", "skip", "extra", "extra", *variants, *variants, *([] if halves else ["sleep"])]
    )
    due = [step for step in range(steps - 1) if step % piece.every == piece.every - 1]
    late = [step for step in due if step >= HISTORY * piece.every]
    step = rng.choice(late) if late and not halves and rng.random() < 0.6 else due[0]
    odd: tuple[int, ...] = (rng.randrange(size - (fault == "p2p" and piece.kind == "pipeline")),)
    if halves:
        odd = tuple(range(size // 2, size)) if rng.random() < 0.5 else tuple(range(1, size, 2))
    return RandomProgram(
        size,
        pieces,
        fault,
        piece.number,
        odd,
        step,
        rng.randrange(piece.rounds),
        steps,
        rng.random() < 0.5,
    )
