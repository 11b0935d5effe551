"""Random distributed programs for the soak: a script of small pieces with at most one fault, and
the truth about it.

The truth is known because the fault is put in here. Nothing of commlens is imported.
"""

from __future__ import annotations

import random
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, replace

HISTORY = 3  # steps after which a rank has a routine

GLOO, NCCL_LIKE = "gloo", "nccl-like"  # the second one is the backend of tests/nccl_like

HEADER = '''\
import os, random, signal, subprocess, sys, tempfile, threading, time
from datetime import timedelta

import torch
import torch.distributed as dist

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ODD, FAULT_STEP = {odd}, {fault_step}


def bad(step):
    return RANK in ODD and step == FAULT_STEP


def write_pid():
    with open(f"pids/{{RANK}}.part", "w") as file:
        file.write(str(os.getpid()))
    os.rename(f"pids/{{RANK}}.part", f"pids/{{RANK}}")


def compute(seconds):
    """Work on one core."""
    a, end = torch.ones(64, 64), time.monotonic() + seconds
    while time.monotonic() < end:
        a = (a @ a).clamp(-1, 1)


def load(step):
    """Load a batch, which takes some ranks longer than others."""
    random.seed(SIZE * step + RANK)
    {load}
    generator = torch.Generator().manual_seed(100 * step + RANK)
    return torch.randn(8, 16, generator=generator)
'''


@dataclass(frozen=True)
class Piece:
    """A part of the program with communication: source lines that run once, and those of every
    step, in which ``x`` is the batch.

    ``variants`` holds disagreements that one rank can cause here: by name, the text to replace and
    its replacement. ``{odd:a|b}`` in the source is ``a``, but ``b`` on the culprit in the fault's
    step if that disagreement is chosen.
    """

    name: str
    step: str
    setup: str = ""
    variants: tuple[str, ...] = ()
    every: int = 1
    of_all: bool = True  # whether one group of all ranks meets here
    worlds: Callable[[int], bool] = lambda size: True
    culprits: Callable[[int], tuple[int, ...]] = lambda size: tuple(range(size))


@dataclass(frozen=True)
class Truth:
    """What commlens may say about a program."""

    fault: str  # its name; "none"
    culprit: int = -1  # -1: nobody, or the two halves disagree and neither is wrong
    kinds: tuple[str, ...] = ()  # beginnings of the verdict's kind
    # whether the evidence may not tell who is wrong: then naming nobody is right, too
    undecided: bool = False
    # whether one rank too few is another one too many: of two ranks that repeat one piece
    either: bool = False
    silent: bool = False  # whether the fault may have no effect
    by_runner: str = ""  # signal that the runner sends to the culprit
    after_s: float = 0.0  # how long after the culprit's start it sends that
    slow: bool = False  # whether the verdict needs many stall timeouts


@dataclass(frozen=True)
class Program:
    """A script for some ranks."""

    seed: int
    size: int
    source: str
    truth: Truth
    pieces: tuple[str, ...]
    backend: str = GLOO


GROUPS = {
    "world": "GROUPS['world'] = dist.group.WORLD",
    "again": "GROUPS['again'] = dist.new_group(list(range(SIZE)), group_desc='again')",
    "halves": (
        "halves = [dist.new_group(list(range(SIZE // 2))), dist.new_group(list(range(SIZE // 2,"
        " SIZE)))]\nGROUPS['halves'] = halves[RANK >= SIZE // 2]"
    ),
    "parity": (
        "parity = [dist.new_group(list(range(i, SIZE, 2))) for i in range(2)]\nGROUPS['parity'] ="
        " parity[RANK % 2]"
    ),
}


def _collective(rng: random.Random, number: int) -> Piece:
    """Return a plain collective on one of the groups, perhaps several times in a row."""
    group = rng.choice(["world", "world", "again", "halves", "parity"])
    size, times, every = rng.choice([4, 12, 1000]), rng.choice([1, 1, 2]), rng.choice([1, 1, 1, 3])
    op = rng.choice(
        [
            "all_reduce",
            "all_gather",
            "broadcast",
            "reduce",
            "reduce_scatter",
            "gather",
            "all_to_all",
            "barrier",
            "async",
        ]
    )
    root = "dist.get_global_rank(group, {odd:0|1:root})"
    tensor = (
        f"torch.full(({{odd:{size}|{size + 3}:shape}},), float(RANK),"
        " dtype={odd:torch.float32|torch.float64:dtype})"
    )
    reduce_op = "op={odd:dist.ReduceOp.SUM|dist.ReduceOp.MAX:reduce-op}"
    lists = "[torch.empty_like(t) for _ in range(dist.get_world_size(group))]"
    calls = {
        "all_reduce": f"dist.all_reduce(t, {reduce_op}, group=group)",
        "all_gather": f"dist.all_gather({lists}, t, group=group)",
        "broadcast": f"dist.broadcast(t, {root}, group=group)",
        # only the root's result is defined
        "reduce": f"dist.reduce(t, {root}, {reduce_op}, group=group)\nt.zero_()",
        "reduce_scatter": (
            "dist.reduce_scatter(t, [t.clone() for _ in range(dist.get_world_size(group))],"
            f" {reduce_op}, group=group)"
        ),
        "gather": (
            f"root = {root}\ndist.gather(t, {lists} if RANK == root else None, root, group=group)"
        ),
        "all_to_all": (
            "n = dist.get_world_size(group)\nt ="
            " t.repeat(n)\ndist.all_to_all_single(torch.empty_like(t), t, group=group)"
        ),
        "barrier": "dist.barrier(group=group)",
        "async": (
            f"works = [dist.all_reduce(t + i, {reduce_op}, group=group, async_op=True) for i in"
            " range(3)]\nfor work in reversed(works):\n    work.wait()"
        ),
    }
    other = (
        "dist.all_gather([torch.empty(5) for _ in range(dist.get_world_size(group))],"
        " torch.ones(5), group=group)"
    )
    body = f"t = {tensor}\n{calls[op]}\ntotal = float(t.sum())"
    step = (
        f"group = GROUPS['{group}']\ntotal = 0.0\nfor _ in"
        f" range({times}):\n{textwrap.indent(_or_other(body, other), '    ')}\nreturn total"
    )
    variants = [
        name
        for name in ("shape", "dtype", "reduce-op", "root")
        if f":{name}}}" in body and op != "barrier"
    ]
    if op == "all_to_all":
        # torch itself refuses that on one rank
        variants = [name for name in variants if name != "shape"]
    if op == "all_gather":
        other = "dist.all_reduce(torch.ones(5), group=group)"
        step = step.replace(
            "dist.all_gather([torch.empty(5) for _ in range(dist.get_world_size(group))],"
            " torch.ones(5), group=group)",
            other,
        )
    is_split = group in ("halves", "parity")
    return Piece(
        f"{op}_{group}_{number}",
        step,
        GROUPS[group],
        (*variants, "op"),
        every,
        not is_split,
        (lambda size: size >= 4 and size % 2 == 0) if is_split else lambda size: True,
    )


def _or_other(body: str, other: str) -> str:
    return f"if {{odd:False|True:op}}:\n{textwrap.indent(other, '    ')}\nelse:\n{textwrap.indent(body, '    ')}"


def _objects(rng: random.Random, number: int) -> Piece:
    gather = """
        found = [None] * SIZE
        dist.all_gather_object(found, {'rank': RANK, 'text': 'x' * random.randint(1, 300)})
        return len(found)"""
    broadcast = """
        found = [step if RANK == 0 else None, 'y']
        dist.broadcast_object_list(found, 0)
        return found[0]"""
    scatter = """
        found = [None]
        dist.scatter_object_list(found, [i for i in range(SIZE)] if RANK == 0 else None, 0)
        return found[0]"""
    return Piece(
        f"objects_{number}",
        _lines(rng.choice([gather, broadcast, scatter])),
        every=rng.choice([1, 3]),
    )


def _ddp(rng: random.Random, number: int) -> Piece:
    setup = f"""
        from torch.nn.parallel import DistributedDataParallel
        net{number} = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
        ddp{number} = DistributedDataParallel(net{number}, find_unused_parameters={rng.random() < 0.3})
        optim{number} = torch.optim.SGD(net{number}.parameters(), 0.01)"""
    return Piece(f"ddp_{number}", _training(f"ddp{number}(x)", number), _lines(setup))


def _fsdp2(rng: random.Random, number: int) -> Piece:
    setup = f"""
        from torch.distributed.fsdp import fully_shard
        fsdp{number} = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range({rng.choice([2, 3])})])
        mesh{number} = dist.init_device_mesh('cpu', (SIZE,))
        for layer in fsdp{number}:
            fully_shard(layer, mesh=mesh{number})
        fully_shard(fsdp{number}, mesh=mesh{number})
        optim{number} = torch.optim.AdamW(fsdp{number}.parameters(), 0.01)"""
    return Piece(f"fsdp2_{number}", _training(f"fsdp{number}(x)", number), _lines(setup))


def _tensor_parallel(rng: random.Random, number: int) -> Piece:
    two_d = rng.random() < 0.5
    mesh = (
        "(2, SIZE // 2), mesh_dim_names=('dp', 'tp'))['tp']"
        if two_d
        else "(SIZE,), mesh_dim_names=('tp',))"
    )
    setup = f"""
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
        tp{number} = torch.nn.Sequential(torch.nn.Linear(16, 60), torch.nn.ReLU(), torch.nn.Linear(60, 4))
        plan = {{'0': ColwiseParallel(), '2': RowwiseParallel()}}
        parallelize_module(tp{number}, dist.init_device_mesh('cpu', {mesh}, plan)
        optim{number} = torch.optim.SGD(tp{number}.parameters(), 0.01)"""
    # the same on all ranks
    batch = "torch.randn(8, 16, generator=torch.Generator().manual_seed(step))"
    worlds = (4, 6) if two_d else (2, 3, 4)
    step = _training(f"tp{number}({batch})", number)
    return Piece(
        f"tp_{number}", step, _lines(setup), of_all=not two_d, worlds=lambda size: size in worlds
    )


def _training(forward: str, number: int) -> str:
    return _lines(f"""
        optim{number}.zero_grad()
        loss = {forward}.square().mean()
        loss.backward()
        optim{number}.step()
        return float(loss.detach())""")


def _pipeline(rng: random.Random, number: int) -> Piece:
    microbatches = rng.choice([1, 2, 3])
    step = f"""
        for micro in range({microbatches}):
            t = torch.full((6,), float(step))
            if RANK > 0:
                dist.recv(t, RANK - 1, tag=3)
            if RANK < SIZE - 1:
                dist.send(t + 1, RANK + 1, tag={{odd:3|4:tag}})
        for micro in range({microbatches}):
            if RANK < SIZE - 1:
                dist.recv(t, RANK + 1, tag=5)
            if RANK > 0:
                dist.send(t, RANK - 1, tag=5)
        return float(t.sum())"""
    culprits = lambda size: tuple(range(size - 1))  # noqa: E731  # the last stage only answers
    return Piece(
        f"pipeline_{number}", _lines(step), variants=("tag",), of_all=False, culprits=culprits
    )


def _ring(rng: random.Random, number: int) -> Piece:
    step = """
        t, got = torch.full((5,), float(RANK)), torch.empty(5)
        send = dist.P2POp(dist.isend, t, (RANK + {odd:1|2:p2p}) % SIZE)
        for work in dist.batch_isend_irecv([send, dist.P2POp(dist.irecv, got, (RANK - 1) % SIZE)]):
            work.wait()
        return float(got.sum())"""
    return Piece(
        f"ring_{number}",
        _lines(step),
        variants=("p2p",),
        of_all=False,
        worlds=lambda size: size > 2,
    )


def _save(rng: random.Random, number: int) -> Piece:
    step = f"""
        if RANK == 0:
            with tempfile.NamedTemporaryFile() as file:
                torch.save(torch.ones({rng.choice([10, 300_000])}), file.name)
                time.sleep({rng.choice([0, 0.4])})
        dist.barrier()
        return 0.0"""
    return Piece(f"save_{number}", _lines(step), every=rng.choice([2, 4]))


def _evaluate(rng: random.Random, number: int) -> Piece:
    step = f"""
        metric = torch.zeros(2)
        for _ in range({rng.choice([1, 3])}):
            metric += torch.tensor([1.0, float(RANK)])
            dist.all_reduce(metric)
        dist.broadcast(metric, {rng.choice([0, 1])})
        return float(metric.sum())"""
    return Piece(f"evaluate_{number}", _lines(step), every=rng.choice([2, 3]))


def _ahead(rng: random.Random, number: int) -> Piece:
    """Return collectives whose results are read only every few steps: until then, a rank runs ahead
    of its device and of the others.
    """
    group, times, read = rng.choice(["world", "again"]), rng.choice([1, 2, 3]), rng.choice([2, 4])
    tensor = (
        "torch.full(({odd:8|11:shape},), float(RANK),"
        " dtype={odd:torch.float32|torch.float64:dtype})"
    )
    body = f"""
        t = {tensor}
        for _ in range({times}):
            dist.all_reduce(t, op={{odd:dist.ReduceOp.SUM|dist.ReduceOp.MAX:reduce-op}}, group=group)
        total = float(t.sum()) if step % {read} == {read - 1} else 0.0"""
    other = (
        "total = 0.0\ndist.all_gather([torch.empty(5) for _ in range(SIZE)], torch.ones(5),"
        " group=group)"
    )
    step = f"group = GROUPS['{group}']\n{_or_other(_lines(body), other)}\nreturn total"
    return Piece(
        f"ahead_{group}_{number}", step, GROUPS[group], ("shape", "dtype", "reduce-op", "op")
    )


def _lines(source: str) -> str:
    return textwrap.dedent(source).strip("\n")


PIECES = (
    _collective,
    _collective,
    _collective,
    _objects,
    _ddp,
    _fsdp2,
    _tensor_parallel,
    _pipeline,
    _ring,
    _save,
    _evaluate,
)
PIECES_ON_NCCL = (*PIECES, _ahead, _ahead)

LOADS = (
    "pass",
    "time.sleep(random.random() / 10)",
    "time.sleep(random.choice([0, 0, 0, {third}]))",
    "compute(random.random() / 5)",
    # longer than a stall timeout, but it works
    "compute({long} if step == 5 and RANK == SIZE - 1 else 0)",
    "subprocess.run([sys.executable, '-S', '-c', 'sum(range(10**6))'], check=True)",
    (
        "list(torch.utils.data.DataLoader(range(8), batch_size=4, num_workers=1)) if step % 4 == 0"
        " else None"
    ),
    "threading.Thread(target=time.sleep, args=(0.2,)).start()",
)

STOPS = {  # name: (source, kinds of the verdict)
    "sleep": ("time.sleep(600)", ("missing",)),
    "lock": ("lock = threading.Lock(); lock.acquire(); lock.acquire()", ("missing",)),
    "pipe": ("os.read(os.pipe()[0], 1)", ("missing",)),
    "child": ("subprocess.run(['sleep', '600'])", ("missing",)),
    "queue": ("import queue; queue.Queue().get()", ("missing",)),
    "loop": ("while True: pass", ("missing",)),
    "raise": ("raise ValueError('bad batch')", ("dead",)),
    "raise-none": ("{}['key']", ("dead",)),
    "exit": ("sys.exit(3)", ("dead",)),
    "exit-0": ("sys.exit(0)", ("missing", "dead")),
    "hard-exit": ("os._exit(4)", ("dead",)),
    "SIGKILL": ("os.kill(os.getpid(), signal.SIGKILL)", ("dead",)),
    "SIGSEGV": ("os.kill(os.getpid(), signal.SIGSEGV)", ("dead",)),
    "SIGSTOP": ("os.kill(os.getpid(), signal.SIGSTOP)", ("missing", "stuck-inside")),
    "SIGTERM": ("subprocess.run(['kill', '-TERM', str(os.getpid())]); time.sleep(600)", ("dead",)),
}

AT_START = {  # name: (source before init_process_group, source after it)
    "never-initialises": ("if RANK in ODD: time.sleep(600)", ""),
    "raises-before-init": ("if RANK in ODD: raise RuntimeError('no such configuration')", ""),
    "exits-before-init": ("if RANK in ODD: os._exit(2)", ""),
    "new-group-order": (
        "",
        (
            "parts = [list(range(SIZE)), [0, 1], [1, 2]]\n"
            "for part in reversed(parts) if RANK in ODD else parts:\n    dist.new_group(part)"
        ),
    ),
    "new-group-on-some": ("", "if RANK not in ODD:\n    dist.new_group([0, 1])\ndist.barrier()"),
    "mesh-shape": (
        "",
        "dist.init_device_mesh('cpu', (SIZE, 1) if RANK in ODD else (2, SIZE // 2))",
    ),
    "asleep-after-init": ("", "if RANK in ODD: time.sleep(600)"),
}


# NCCL makes a group's communicator at its first collective, and these groups have none; new_group()
# itself waits for nobody.
HARMLESS_ON_NCCL = ("new-group-order",)
# Groups are numbered: a rank that makes more or fewer of them misses those that are made later, if
# any.
PERHAPS_HARMLESS_ON_NCCL = ("new-group-on-some", "mesh-shape")


def generate(seed: int, stall_timeout_s: float, backend: str = GLOO) -> Program:
    """Return the program of a seed.

    Not all is drawn over a backend that behaves as NCCL does: HARMLESS_ON_NCCL says which starts,
    and NCCL has no tags that could differ. Two things are drawn over neither: asynchronous ops on
    two groups in another order on each rank, which are legal but a deadlock on one device, and
    throttled CPUs, which would slow the emulated device down as well.
    """
    rng = random.Random(seed)
    size = rng.choice([2, 2, 3, 4, 4, 4, 5, 6])
    pieces: list[Piece] = []
    while len(pieces) < rng.choice([1, 2, 3, 4, 5]):
        piece = rng.choice(PIECES_ON_NCCL if backend == NCCL_LIKE else PIECES)(rng, len(pieces))
        if backend == NCCL_LIKE:
            piece = replace(piece, variants=tuple(name for name in piece.variants if name != "tag"))
        if piece.worlds(size):
            pieces.append(piece)
    if all(piece.every > 1 for piece in pieces):
        pieces[0] = replace(pieces[0], every=1)
    load = rng.choice(LOADS).format(third=stall_timeout_s / 3, long=stall_timeout_s * 1.5)
    style = rng.choice(
        [
            "none",
            "none",
            "stop",
            "stop",
            "calls",
            "calls",
            "calls",
            "start",
            "runner",
            *["halves"] * (size % 2 == 0),
        ]
    )
    steps = rng.randint(8, 12)
    return _Builder(rng, seed, size, steps, pieces, load, backend).build(style)


class _Builder:
    """Puts one fault into the pieces, and writes the script."""

    def __init__(
        self,
        rng: random.Random,
        seed: int,
        size: int,
        steps: int,
        pieces: list[Piece],
        load: str,
        backend: str,
    ) -> None:
        self.backend = backend
        self.rng, self.seed, self.size, self.steps, self.pieces, self.load = (
            rng,
            seed,
            size,
            steps,
            pieces,
            load,
        )
        self.culprit, self.fault_step = -1, -1
        self.half: list[int] = []  # the ranks that have the fault if it is of one half
        self.odd = (-1, "")  # the piece with a disagreement, and its name
        self.before = self.after = ""
        self.calls = [[f"result += {piece.name}(step, x)"] for piece in pieces]

    def build(self, style: str) -> Program:
        truth = {
            "none": self._none,
            "stop": self._stop,
            "calls": self._change_calls,
            "start": self._fail_at_start,
            "runner": self._signal,
            "halves": self._part_halves,
        }[style]()
        return Program(
            self.seed,
            self.size,
            self._source(truth),
            truth,
            tuple(piece.name for piece in self.pieces),
            self.backend,
        )

    def _none(self) -> Truth:
        return Truth("none")

    def _signal(self) -> Truth:
        signal_name = self.rng.choice(["SIGKILL", "SIGTERM", "SIGSTOP"])
        kinds = ("missing", "stuck-inside") if signal_name == "SIGSTOP" else ("dead",)
        self.steps = 400  # the job still runs when the signal comes
        self.load = "time.sleep(0.1)"
        return Truth(
            f"{signal_name} from outside",
            self.rng.randrange(self.size),
            kinds,
            by_runner=signal_name,
            after_s=self.rng.choice([0.0, 2.0, 5.0, 8.0]) + self.rng.random(),
        )

    def _draw(self, piece: Piece) -> None:
        """Draw the culprit and the fault's step: often late, sometimes the first."""
        self.culprit = self.rng.choice(piece.culprits(self.size))
        due = [step for step in range(self.steps - 1) if step % piece.every == piece.every - 1]
        late = [step for step in due if step >= HISTORY * piece.every]
        self.fault_step = self.rng.choice(late) if late and self.rng.random() < 0.75 else due[0]

    def _undecided(self, *, new_line: bool = False) -> bool:
        """Return whether neither the routine nor a majority of the group tells who is wrong.

        Without an optimizer, nothing shows where a step begins: what repeats may be a loop over
        layers, which ends once. A call at a line that no rank came to before may be one that the
        other rank leaves out.
        """
        has_steps = any("optim" in each.setup for each in self.pieces)
        has_history = (
            has_steps
            and self.fault_step >= HISTORY * max(each.every for each in self.pieces)
            and not new_line
        )
        has_majority = self.size > 2 and all(each.of_all for each in self.pieces)
        return not has_history and not has_majority

    def _stop(self) -> Truth:
        number = self.rng.randrange(len(self.pieces))
        self._draw(replace(self.pieces[number], culprits=lambda size: tuple(range(size))))
        name, (source, kinds) = self.rng.choice(list(STOPS.items()))
        self.calls[number].insert(0, f"if bad(step):\n    {source}")
        # A process that ends well did too few rounds, or the others do too many.
        undecided = name == "exit-0" and self._undecided(new_line=True)
        return Truth(name, self.culprit, kinds, undecided=undecided, slow=name == "loop")

    def _fail_at_start(self) -> Truth:
        names = [name for name in AT_START if not (name.startswith("new-group") and self.size < 3)]
        if self.backend == NCCL_LIKE:
            names = [name for name in names if name not in HARMLESS_ON_NCCL]
        name = self.rng.choice(
            [name for name in names if name != "mesh-shape" or self.size in (4, 6)]
        )
        self.before, self.after = AT_START[name]
        # nobody waits there for one outside
        self.culprit = self.rng.randrange(2 if name == "new-group-on-some" else self.size)
        kinds = (
            ("dead",)
            if "before-init" in name and "never" not in name
            else ("missing", "mismatch", "cycle")
        )
        return Truth(f"start: {name}", self.culprit, kinds, silent=self._may_pass(name))

    def _may_pass(self, name: str) -> bool:
        """Return whether nothing may come of a start that differs."""
        return self.backend == NCCL_LIKE and name in PERHAPS_HARMLESS_ON_NCCL

    def _change_calls(self) -> Truth:
        number = self.rng.randrange(len(self.pieces))
        piece = self.pieces[number]
        self._draw(piece)
        kinds = ("mismatch", "missing", "cycle", "stuck-inside")
        changes = ["skip", "extra", *piece.variants, *piece.variants]
        if (
            number + 1 < len(self.pieces)
            and piece.of_all
            and self.pieces[number + 1].of_all
            and self.pieces[number + 1].every == piece.every
        ):
            changes += ["reorder", "reorder"]
        change = self.rng.choice(changes)
        call = self.calls[number][0]
        if change == "skip":
            self.calls[number] = [f"if not bad(step):\n    {call}"]
        elif change == "extra":
            self.calls[number] = [call, f"if bad(step):\n    {call}"]
        elif change == "reorder":
            both = [call, self.calls[number + 1][0]]
            ordered, swapped = (
                textwrap.indent("\n".join(calls), "    ") for calls in (both, both[::-1])
            )
            self.calls[number], self.calls[number + 1] = (
                [f"if bad(step):\n{swapped}\nelse:\n{ordered}"],
                [],
            )
            return Truth("reorder", self.culprit, kinds, undecided=self._undecided(), silent=True)
        else:
            self.odd = number, change
        either = self.size == 2 and len(self.pieces) == 1 and change in ("skip", "extra")
        # A message too many or too few can lie in a buffer for ever; a rooted collective less is
        # made up for by the next one.
        return Truth(
            f"{change} in {piece.name}",
            self.culprit,
            kinds,
            undecided=self._undecided(new_line=change in ("extra", "op")),
            silent=change in ("skip", "extra"),
            either=either,
        )

    def _part_halves(self) -> Truth:
        """Let one half of the ranks do something else in the first step: neither half is known to
        be wrong.
        """
        self.half = self.rng.choice(
            [
                list(range(self.size // 2)),
                list(range(self.size // 2, self.size)),
                list(range(0, self.size, 2)),
            ]
        )
        number = self.rng.randrange(len(self.pieces))
        piece = self.pieces[number]
        self.fault_step = piece.every - 1
        changes = [
            "skip",
            "extra",
            *(name for name in piece.variants if name not in ("p2p", "tag")),
        ]
        at_start = ["new-group-order"] * (self.size > 2) + ["mesh-shape"] * (self.size in (4, 6))
        if self.backend == NCCL_LIKE:
            at_start = [name for name in at_start if name not in HARMLESS_ON_NCCL]
        change = self.rng.choice(changes + at_start)
        call = self.calls[number][0]
        if change in at_start:
            self.before, self.after = AT_START[change]
        elif change == "skip":
            self.calls[number] = [f"if not bad(step):\n    {call}"]
        elif change == "extra":
            self.calls[number] = [call, f"if bad(step):\n    {call}"]
        else:
            self.odd = number, change
        # the half may be a whole group of the piece
        silent = change in ("skip", "extra") or not piece.of_all or self._may_pass(change)
        return Truth(
            f"halves: {change}",
            kinds=("mismatch", "missing", "cycle", "stuck-inside"),
            silent=silent,
        )

    def _resolve(self, number: int, source: str) -> str:
        """Replace ``{odd:a|b:name}``."""
        parts = source.split("{odd:")
        found = [parts[0]]
        for part in parts[1:]:
            inside, _, rest = part.partition("}")
            values, _, name = inside.rpartition(":")
            usual, _, other = values.partition("|")
            found.append(
                (f"({other} if bad(step) else {usual})" if (number, name) == self.odd else usual)
                + rest
            )
        return "".join(found)

    def _source(self, truth: Truth) -> str:
        rng = self.rng
        parts = [
            HEADER.format(
                odd=self.half or [self.culprit], fault_step=self.fault_step, load=self.load
            )
        ]
        parts += [
            f"def {piece.name}(step, x):\n{textwrap.indent(self._resolve(i, piece.step), '    ')}\n"
            for i, piece in enumerate(self.pieces)
        ]
        timeout = rng.choice(["", "", "", ", timeout=timedelta(seconds=60)"])
        setups = dict.fromkeys(piece.setup for piece in self.pieces if piece.setup)
        train = []
        for piece, calls in zip(self.pieces, self.calls, strict=True):
            text = "\n".join(calls)
            if piece.every > 1 and text:
                text = (
                    f"if step % {piece.every} =="
                    f" {piece.every - 1}:\n{textwrap.indent(text, '    ')}"
                )
            train.append(text)
        indented = textwrap.indent("\n".join(filter(None, train)), "    ")
        parts.append(f"def train_step(step, x):\n    result = 0.0\n{indented}\n    return result\n")
        pid_first = truth.by_runner and truth.after_s < 1.5
        main = [
            f"dist.init_process_group('gloo'{timeout})",
            "" if pid_first else "write_pid()",
            self.after,
            *setups,
            (
                f"result = 0.0\nfor step in range({self.steps}):\n    result += train_step(step,"
                " load(step))"
            ),
            rng.choice(["", "dist.barrier()"]),
            "os.write(1, f'rank {RANK} result {result:.9g}\\n'.encode())",
            rng.choice(["", "dist.destroy_process_group()", "dist.destroy_process_group()"]),
        ]
        body = "\n".join(
            filter(
                None,
                [
                    "torch.set_num_threads(1)",
                    "torch.manual_seed(0)",
                    "write_pid()" if pid_first else "",
                    self.before,
                    *main,
                ],
            )
        )
        parts.append(
            'GROUPS = {}\n\nif __name__ == "__main__":\n' + textwrap.indent(body, "    ") + "\n"
        )
        return "\n\n".join(parts)
