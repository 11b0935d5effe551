"""The checks of gpu_check.py, seen from outside: start the ranks of each, and judge what they saw."""

from __future__ import annotations

import contextlib
import json
import queue
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from _gpu_machine import REPOSITORY, Processes, ended
from _report import us

Finds = dict[str, Any]
# whether it is as it should be (None: nothing to judge), and the finding in words
Judged = tuple[bool | None, str]

HERE = Path(__file__).resolve().parent
FACTS = REPOSITORY / "tests" / "nccl_like" / "facts.py"
ENGINES = {"python": "Recorder", "native": "NativeRecorder"}
BY_TORCH = "native-recorder"
ENQUEUED = "enqueued"  # the device has not started it
KERNEL_S = 3.0


class NoResultError(Exception):
    """A check gave no result; the text says why."""

    def __init__(self, reason: str, *, hung: bool = False) -> None:
        super().__init__(reason)
        self.hung = hung


class SkippedError(Exception):
    """A check cannot run here; the text says why."""


class Pair:
    """Whether two ranks can share the GPU: the healthy job of two ranks tells, and the checks of
    such jobs wait for it.
    """

    PATIENCE_S = 90.0

    def __init__(self) -> None:
        self._told = threading.Event()
        self._reason = "no healthy job of two ranks was run"

    def tell(self, reason: str) -> None:
        """Say why they cannot; an empty text: they can."""
        self._reason = reason
        self._told.set()

    def reason(self) -> str:
        """Wait for the healthy job, and return why two ranks cannot share the GPU: empty if they
        can.
        """
        self._told.wait(self.PATIENCE_S)
        return self._reason


@dataclass
class Bench:
    """What the checks of one lane run on."""

    processes: Processes
    scratch: Path
    device: str = "cuda"
    backend: str = "nccl"
    quick: bool = False
    limit_s: float = 60.0  # of the check that runs now
    two_ranks: Pair = field(default_factory=Pair)  # of all lanes

    @property
    def pair(self) -> str:
        """Why two ranks cannot share the GPU; empty: they can."""
        return self.two_ranks.reason()

    @property
    def is_dry(self) -> bool:
        """Whether this is a dry run without a GPU, which judges nothing."""
        return self.device != "cuda"

    def folder(self) -> Path:
        """Return a new folder."""
        return Path(tempfile.mkdtemp(dir=self.scratch, prefix="check-"))

    def rank_command(self, check: str, way: str, settings: Finds | None = None) -> list[str]:
        """Return the command that runs one rank."""
        given = {
            "way": way,
            "device": self.device,
            "backend": self.backend,
            "folder": str(self.folder()),
            "quick": self.quick,
            "settings": settings or {},
        }
        return [
            sys.executable,
            "-W",
            "ignore",
            str(HERE / "_gpu_rank.py"),
            check,
            json.dumps(given),
        ]

    def rank(
        self, check: str, way: str = "python", settings: Finds | None = None, **environ: str
    ) -> Finds:
        """Run one rank and return what it saw."""
        ended = self.processes.run(self.rank_command(check, way, settings), self.limit_s, **environ)
        if ended.result is None or ended.status != 0:
            raise NoResultError(ended.reason, hung=ended.status is None)
        return ended.result

    def commlens(self, *arguments: str, limit_s: float | None = None, **environ: str) -> Any:
        """Run the command line."""
        return self.processes.run(
            [sys.executable, "-W", "ignore", "-m", "commlens", *arguments],
            limit_s or self.limit_s,
            **environ,
        )


@dataclass(frozen=True)
class Check:
    """One check."""

    name: str
    claim: str  # a sentence that the check finds true or false
    limit_s: float
    measure: Callable[[Bench], Finds]
    judge: Callable[[Finds], Judged]
    # Lanes run side by side, and the checks of one lane one after another; those of ALONE run last,
    # when nothing else does.
    lane: str = "one rank"


ALONE = "alone"
HEALTHY_PAIR = "pair, healthy"


# --- the engine and the facts


def build_engine(bench: Bench) -> Finds:
    """Build the native engine, and record with it."""
    began = time.monotonic()
    if not bench.quick:
        built = bench.commlens("build-native", limit_s=bench.limit_s - 30)
        if built.status != 0:
            raise NoResultError(built.reason, hung=built.status is None)
    seconds = time.monotonic() - began
    doctor = bench.commlens("doctor", limit_s=40)
    return {**bench.rank("engine", "native"), "build_s": seconds, "doctor": doctor.out}


def judge_engine(finds: Finds) -> Judged:
    """Return whether the native engine recorded."""
    return (
        finds["engine"] == ENGINES["native"] and not finds["lost"],
        f"{finds['engine']}, built in {finds['build_s']:.0f} s",
    )


def check_facts(ranks: int) -> Callable[[Bench], Finds]:
    """Return the check of the claims about NCCL that need so many ranks."""

    def measure(bench: Bench) -> Finds:
        if not FACTS.exists():
            raise SkippedError(f"{FACTS.relative_to(REPOSITORY)} does not exist")
        if bench.is_dry:
            raise SkippedError("the claims are checked on an emulation by the tests")
        if ranks > 1 and bench.pair:
            raise SkippedError(f"two ranks do not share this GPU: {bench.pair}")
        found = bench.folder() / "facts.json"
        program = [sys.executable, "-W", "ignore", str(FACTS), "--backend", bench.backend]
        ended = bench.processes.run(
            [*program, "--ranks", str(ranks), "--json", str(found)], bench.limit_s
        )
        with contextlib.suppress(OSError, ValueError):
            return {
                "facts": json.loads(found.read_text(encoding="utf-8")),
                "output": ended.out[-3000:],
                "status": ended.status,
            }
        raise NoResultError(ended.reason, hung=ended.status is None)

    return measure


def judge_facts(finds: Finds) -> Judged:
    """Return whether all claims hold, and which do not."""
    rows = finds["facts"]["facts"]
    wrong = [row["name"] for row in rows if not row["holds"]]
    words = f"{len(rows) - len(wrong)} of {len(rows)} hold"
    return not wrong, words + (f"; not {', '.join(wrong)}" if wrong else "")


# --- states


def check_states(
    way: str, settings: Finds | None = None, **environ: str
) -> Callable[[Bench], Finds]:
    """Return the check of the records behind a kernel of three seconds."""
    return lambda bench: bench.rank("states", way, settings, **environ)


def judge_states(way: str, *, learns: bool = True) -> Callable[[Finds], Judged]:
    """Return the judge of these records.

    Args:
        way: the engine.
        learns: torch's recorder is on, and tells; otherwise a call may also wait for its end.
    """

    def judge(finds: Finds) -> Judged:
        during, after = (shown(finds[name]) for name in ("during", "after"))
        words = (
            f"returned after {finds['returned_s'] * 1000:.1f} ms; before its end {during}, after it"
            f" {after}; lost {finds['lost']}"
        )
        if finds["engine"] != ENGINES[way] or finds["lost"]:
            return False, f"{words}; recorded by {finds['engine']}"
        if not learns and finds["returned_s"] > KERNEL_S / 2:
            return None, words
        early = [one for one in finds["during"] if one["state"] in ("completed", "failed")]
        by_return = [one for one in [*finds["during"], *finds["after"]] if one["how"] == "return"]
        learned = [
            one for one in finds["after"] if one["state"] == "completed" and one["how"] == BY_TORCH
        ]
        is_right = finds["returned_s"] < KERNEL_S / 2 and not early and not by_return
        return is_right and (not learns or len(learned) == len(finds["after"]) > 0), words

    return judge


def shown(states: list[Finds]) -> str:
    """Return the states of several collectives in words: ``4 issued (native-recorder)``."""
    counted = Counter(
        one["state"] + (f" ({one['how']})" if one["how"] not in ("not-yet", "unknown") else "")
        for one in states
    )
    return ", ".join(f"{count} {name}" for name, count in counted.items()) or "nothing recorded"


def judge_timing(finds: Finds) -> Judged:
    """Return whether what waited behind the kernel was known not to have started, and was complete
    afterwards.
    """
    words = f"before its end {shown(finds['during'])}, after it {shown(finds['after'])}"
    waited = all((one["state"], one["how"]) == ("issued", ENQUEUED) for one in finds["during"])
    return waited and all(one["state"] == "completed" for one in finds["after"]), words


def judge_cpu(finds: Finds) -> Judged:
    """Return the main thread's share of a processor while it waits."""
    return None, ", ".join(
        f"{name} {one['cpu_share']:.0%} of {one['wall_s']:.2f} s" for name, one in finds.items()
    )


def judge_graph(finds: Finds) -> Judged:
    """Return whether a CUDA graph was captured and replayed."""
    recorded = (
        f"{finds.get('recorded_by_capture', 0)} records of the capture, {finds.get('recorded', 0)}"
        f" in all; {shown(finds.get('after', []))}"
    )
    return not finds["error"], finds["error"] or f"captured and replayed; {recorded}"


def judge_ring(finds: Finds) -> Judged:
    """Return what the ring buffer still holds."""
    begins_in_flight = (
        finds["first_in_flight"] is not None and finds["first_in_flight"] == finds["oldest_kept"]
    )
    all_completed = all(name.startswith("completed/") for name in finds["states_after"])
    problems = "; ".join(finds["problems"]) or "no problem named"
    words = (
        f"3,000 issued in {finds['issued_s']:.2f} s; {finds['kept']} kept, from the"
        f" {finds['oldest_kept']}th on; first in flight: {finds['first_in_flight']};"
        f" {finds['states']}; afterwards {finds['states_after']}; {problems}"
    )
    return begins_in_flight and all_completed and not finds["lost"], words


# --- torch's own dump


def check_torch_dump(bench: Bench) -> Finds:
    """Diagnose the dump of torch's recorder."""
    finds = bench.rank("torch_dump")
    read = bench.commlens("diagnose", finds["dump"], "--json", limit_s=40)
    with contextlib.suppress(ValueError):
        verdict = json.loads(read.out)
        return {**finds, "kind": verdict.get("kind"), "summary": verdict.get("summary")}
    return {**finds, "kind": "", "summary": read.reason}


def judge_torch_dump(finds: Finds) -> Judged:
    """Return whether the dump was read."""
    return finds["kind"] == "healthy", f"{finds['kind']}: {finds['summary']}"


# --- two ranks on one GPU


def check_pair(case: str, stall_s: float) -> Callable[[Bench], Finds]:
    """Return the check of a job of two ranks with one fault."""

    def measure(bench: Bench) -> Finds:
        if case != "healthy" and bench.pair:
            raise SkippedError(f"two ranks do not share this GPU: {bench.pair}")
        folder = bench.folder()
        log, program = folder / "verdicts.jsonl", str(HERE / "_gpu_pair.py")
        ended = bench.commlens(
            "launch",
            "--standalone",
            "--nproc-per-node",
            "2",
            "--stall-timeout",
            str(stall_s),
            "--abort-on",
            "stall,mismatch",
            "--on-verdict",
            f"cat >> {shlex.quote(str(log))}",
            "--dump-dir",
            str(folder / "dumps"),
            program,
            case,
            bench.device,
            bench.backend,
            # How long NCCL's watchdog waits for others' dumps before it aborts: a minute by
            # default.
            TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC="3000",
            COMMLENS_BOX_DIR=str(folder / "boxes"),
            OMP_NUM_THREADS="1",
        )
        verdicts = []
        with contextlib.suppress(OSError, ValueError):
            verdicts = [
                json.loads(line)["verdict"] for line in log.read_text(encoding="utf-8").splitlines()
            ]
        kept = ("kind", "why", "culprits", "victims", "confidence", "summary", "source")
        finds = {
            "status": ended.status,
            "seconds": ended.seconds,
            "ended_well": ended.out.count("ended well"),
            "verdicts": [{name: verdict.get(name) for name in kept} for verdict in verdicts],
            "out": ended.out[-600:],
            "err": ended.err[-2500:],
        }
        if case == "healthy":
            well = finds["ended_well"] == 2 and ended.status == 0
            bench.two_ranks.tell("" if well else f"the healthy job {ended.reason}")
            if not well:
                raise NoResultError(bench.pair, hung=ended.status is None)
        return finds

    return measure


def judge_healthy(finds: Finds) -> Judged:
    """Return whether the healthy job ended well and without a verdict."""
    return (
        finds["ended_well"] == 2 and not finds["verdicts"],
        f"ended well in {finds['seconds']:.0f} s, {len(finds['verdicts'])} verdicts",
    )


def judge_fault(culprits: list[int] | None) -> Callable[[Finds], Judged]:
    """Return the judge of a verdict that should name these ranks; None: no rank can be named, but
    the ranks disagree.
    """

    def judge(finds: Finds) -> Judged:
        if not finds["verdicts"]:
            how = (
                "ended at its limit"
                if finds["status"] is None
                else f"ended with status {finds['status']}"
            )
            return False, f"no verdict; {how} after {finds['seconds']:.0f} s"
        first = finds["verdicts"][0]
        words = (
            f"{first['kind']} ({first['why']}), culprits {first['culprits']}, confidence"
            f" {first['confidence']}: {first['summary']}"
        )
        if culprits is None:
            return str(first["kind"]).startswith("mismatch") or first["culprits"] == [1], words
        return first["culprits"] == culprits, words

    return judge


# --- what a collective costs


def check_cost(bench: Bench) -> Finds:
    """Let bare and recorded processes take turns: each issues a block of collectives when it is its
    turn.
    """
    rounds = 3 if bench.quick else 25
    until = time.monotonic() + bench.limit_s - 5
    with contextlib.ExitStack() as stack:
        running = {
            name: stack.enter_context(taking_turns(bench, bench.rank_command("cost", way)))
            for name, way in {
                "bare": "bare",
                "python": "python",
                "native": "native",
                "bare again": "bare",
            }.items()
        }
        for name, one in running.items():
            if one.read(until) != "ready":
                raise NoResultError(f"{name} did not get ready", hung=True)
        blocks: dict[str, list[Finds]] = {name: [] for name in running}
        for _ in range(rounds):
            for name, one in running.items():
                if time.monotonic() > until - 3:
                    break
                one.write("block")
                blocks[name].append(json.loads(one.read(until)))
        engines = {}
        for name, one in running.items():
            one.write("end")
            engines[name] = json.loads(one.read(until + 4))["engine"]
    figures: Finds = {
        name: {
            case: {
                figure: statistics.median(block[case][figure] for block in found)
                for figure in found[0][case]
            }
            for case in found[0]
        }
        for name, found in blocks.items()
        if found
    }
    return {"rounds": min(map(len, blocks.values())), "engines": engines, "figures": figures}


class Turn:
    """A process that answers a line with a line."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._collect, args=(process.stdout,), daemon=True).start()

    def _collect(self, stream: IO[str]) -> None:
        for line in stream:
            self.lines.put(line.strip())
        self.lines.put("")

    def write(self, line: str) -> None:
        """Write a line."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def read(self, until: float) -> str:
        """Return its next line.

        Raises:
            NoResultError: there is none until then.
        """
        try:
            line = self.lines.get(timeout=max(0.1, until - time.monotonic()))
        except queue.Empty:
            raise NoResultError("a process of the comparison did not answer", hung=True) from None
        if not line:
            raise NoResultError("a process of the comparison ended early")
        return line


@contextlib.contextmanager
def taking_turns(bench: Bench, command: list[str]) -> Iterator[Turn]:
    """Start a process that takes turns, and end it."""
    with (bench.folder() / "err").open("w") as err:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=err,
            text=True,
            env=bench.processes.environ,
            start_new_session=True,
        )
        with ended(process):
            yield Turn(process)


def judge_cost(finds: Finds) -> Judged:
    """Return the figures, and whether each engine recorded."""
    figures, words = finds["figures"], []
    for case in figures["bare"]:
        each = [
            f"{name} {us(one[case]['p50_us'])} / {us(one[case]['p99_us'])}"
            for name, one in figures.items()
        ]
        words.append(f"{case}: {', '.join(each)} us (p50 / p99)")
    right = all(finds["engines"].get(way) == engine for way, engine in ENGINES.items())
    return right, f"{'; '.join(words)}; {finds['rounds']} rounds"


# --- who uses the GPU


def judge_watcher(finds: Finds) -> Judged:
    """Return whether the watcher has no context on the GPU by nvidia-smi. NVML, through which it
    reads counters, holds devices open.
    """
    smi = finds.get("nvidia_smi")
    listed = (
        [line for line in smi if line.split(",")[0].strip() == str(finds["watcher"])]
        if isinstance(smi, list)
        else []
    )
    words = (
        f"the watcher is {'' if listed else 'not '}listed by nvidia-smi; NVML holds"
        f" {', '.join(finds['devices']) or 'no device'}"
    )
    return finds["is_running"] and isinstance(smi, list) and not listed, words


def judge_fork(finds: Finds) -> Judged:
    """Return whether forked children did their work, and recording went on."""
    well = (
        finds["seen"] == 32 and finds["child"] == 0 and finds["is_recording"] and not finds["lost"]
    )
    goes_on = "goes on" if finds["is_recording"] else "stopped"
    return (
        well,
        f"{finds['seen']} of 32 samples loaded, child status {finds['child']}, recording {goes_on}",
    )


def judge_driver(finds: Finds) -> Judged:
    """Return whether CUDA works in a child that was forked while the parent was recorded and
    verified.
    """
    works = finds["child"] == "2.0"
    return (
        works and not finds["initialised"] and not finds["devices"],
        f"in the child: {finds['child'] or 'nothing'}; held before: {finds['devices']}",
    )


def graph_check(way: str, lane: str) -> Check:
    """Return the check of CUDA graphs."""
    return Check(
        f"graph, {way}",
        f"A CUDA graph is captured and replayed ({way})",
        45,
        lambda bench: bench.rank("graph", way),
        judge_graph,
        lane,
    )


def ring_check(way: str, lane: str) -> Check:
    """Return the check of the ring buffer."""
    claim = (
        "Behind a kernel of 8 s, the ring buffer begins with a collective in flight, and all"
        f" complete afterwards ({way} engine)"
    )
    return Check(f"ring, {way}", claim, 45, lambda bench: bench.rank("ring", way), judge_ring, lane)


def states_check(way: str, lane: str) -> Check:
    """Return the check of the states of collectives behind a long kernel."""
    claim = (
        "A collective behind a long kernel is in flight, then completed as torch's recorder tells"
        f" ({way} engine)"
    )
    return Check(f"states, {way}", claim, 50, check_states(way), judge_states(way), lane)


CHECKS: list[Check] = [
    Check(
        "engine",
        "commlens build-native gives the native engine",
        200,
        build_engine,
        judge_engine,
        "native engine",
    ),
    states_check("native", "native engine"),
    graph_check("native", "native engine"),
    ring_check("native", "native engine"),
    graph_check("bare", "native engine"),
    Check(
        "facts",
        "The claims about NCCL on which commlens builds hold",
        200,
        check_facts(1),
        judge_facts,
        "facts",
    ),
    Check(
        "facts, two ranks",
        "The claims about NCCL that need two ranks hold",
        200,
        check_facts(2),
        judge_facts,
        "facts, two ranks",
    ),
    states_check("python", "one rank"),
    graph_check("python", "one rank"),
    Check(
        "blocking wait",
        "With TORCH_NCCL_BLOCKING_WAIT, collectives are recorded",
        40,
        check_states("python", TORCH_NCCL_BLOCKING_WAIT="1"),
        judge_states("python", learns=False),
        "one rank",
    ),
    Check(
        "recorder off",
        "Without torch's recorder, nothing is taken for complete before its end",
        40,
        check_states("python", TORCH_FR_BUFFER_SIZE="0", TORCH_NCCL_TRACE_BUFFER_SIZE="0"),
        judge_states("python", learns=False),
        "one rank",
    ),
    Check(
        "timing",
        "With TORCH_NCCL_ENABLE_TIMING, it is known what the device has not started",
        40,
        check_states("python", {"timing": True}, TORCH_NCCL_ENABLE_TIMING="1"),
        judge_timing,
        "one rank",
    ),
    ring_check("python", "one rank"),
    Check(
        "watcher",
        "The watcher process has no context on the GPU",
        45,
        lambda bench: bench.rank("watcher", settings={"watched": False}),
        judge_watcher,
        "processes",
    ),
    Check(
        "driver",
        "A recorded and verified process starts no driver before the program does",
        45,
        lambda bench: bench.rank("driver"),
        judge_driver,
        "processes",
    ),
    Check(
        "fork",
        "Forked data loaders and children do not disturb recording",
        45,
        lambda bench: bench.rank("fork"),
        judge_fork,
        "processes",
    ),
    Check(
        "torch's dump",
        "commlens diagnose reads the dump of torch's own recorder",
        60,
        check_torch_dump,
        judge_torch_dump,
        "processes",
    ),
    Check(
        HEALTHY_PAIR,
        "Two ranks share one GPU, each as a host of its own, and nothing is reported",
        75,
        check_pair("healthy", 20),
        judge_healthy,
        "two ranks",
    ),
    Check(
        "pair, asleep",
        "A rank that sleeps is named",
        60,
        check_pair("asleep", 4),
        judge_fault([1]),
        "two ranks",
    ),
    Check(
        "pair, skipped",
        "A rank that skips a collective is named",
        60,
        check_pair("skipped", 4),
        judge_fault([1]),
        "two ranks",
    ),
    Check(
        "pair, size",
        "Sizes that differ are reported",
        60,
        check_pair("size", 4),
        judge_fault(None),
        "two ranks, more",
    ),
    Check(
        "pair, few",
        "Sizes that differ are reported also where NCCL ends with a wrong result",
        60,
        check_pair("few", 4),
        judge_fault(None),
        "two ranks, more",
    ),
    Check(
        "pair, order",
        "Two groups in another order are a cycle",
        60,
        check_pair("order", 4),
        judge_fault([1]),
        "two ranks, more",
    ),
    Check(
        "pair, timeout",
        "After NCCL's timeout and abort, the rank that did not come is named",
        75,
        check_pair("timeout", 60),
        judge_fault([1]),
        "two ranks, more",
    ),
    Check(
        "CPU share",
        "How busy the main thread is while it waits for the device",
        45,
        lambda bench: bench.rank("cpu_share"),
        judge_cpu,
        ALONE,
    ),
    Check(
        "cost",
        "What recording adds to a call that issues a collective",
        90,
        check_cost,
        judge_cost,
        ALONE,
    ),
]
"""Those of one lane run in this order: those that matter most come first."""
