"""Runs a function on several ranks, for tests: :func:`run_on_ranks`. No rank and no file is left
behind, whatever happens. In such a function, :func:`assert_replicas_agree` compares numbers.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from commlens import config
from commlens.blackbox import job_dirs
from commlens.errors import CommandError, RanksFailed, require_torch
from commlens.model.verdict import Verdict
from commlens.testing.observer_client import PREFIX, ObserverClient
from commlens.text import capital, exit_phrase, ranks_phrase, verb

if TYPE_CHECKING:
    import torch

BACKENDS: Final = ("gloo", "fake")
_POLL_S: Final = 0.05
_AFTER_ERROR_S: Final = 2.0  # for the errors of other ranks: one of them may be earlier
_END_S: Final = 5.0


class FailedRank(NamedTuple):
    """The failure of one rank."""

    words: str  # a clause
    at: float = 0.0  # monotonic; of a rank that left nothing readable 0.0, before all others
    traceback: str = ""


@dataclass
class Rank:
    """One rank's process."""

    number: int
    process: subprocess.Popen[bytes]
    result_file: Path  # in which it leaves its result
    output_file: Path  # that receives its output and standard error
    failure: FailedRank | None = None  # if it has ended without a value
    value: Any = None  # that the function returned

    def read_result(self) -> None:
        """Set the value or the failure. The process has ended."""
        ended = exit_phrase(self.process.returncode)
        try:
            result: dict[str, Any] = pickle.loads(self.result_file.read_bytes())
        except OSError:
            self.failure = FailedRank(f"its process {ended} before the function returned")
        except Exception as error:
            words = f"its result cannot be unpickled here: {type(error).__name__}: {error}"
            self.failure = FailedRank(words)
        else:
            self.value = result.get("value")
            if "error" in result:
                self.failure = FailedRank(result["kind"], result["at"], result["error"])
            elif self.process.returncode != 0:
                words = f"its process {ended} after the function returned"
                self.failure = FailedRank(words, result["at"])


def run_on_ranks(
    function: Callable[..., Any],
    *args: Any,
    world_size: int = 2,
    backend: str = "gloo",
    timeout_s: float = 60.0,
) -> list[Any]:
    """Call a function on each of several ranks, and return what it returned, by rank.

    With gloo, each rank is a new process, with the default group initialised before the call and
    destroyed after it; RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE are set. The ranks are
    recorded. With the backend ``fake``, the function is called once, in this process, as rank 0 of
    a world without other processes: its collectives return at once, and the list has one item.

    Args:
        function: at the top level of a module that the ranks can import; its arguments and its
            result must be picklable.
        *args: its arguments, the same on each rank.
        world_size: the number of ranks.
        backend: ``gloo`` or ``fake``.
        timeout_s: seconds until the ranks are ended, with commlens's verdict on why they hang.

    Raises:
        RanksFailed: a rank raised, died or hung. The message has the first error's rank and
            traceback.
        CommandError: the function or a parameter cannot be used.
        MissingDependency: torch is not installed.
    """
    __tracebackhide__ = True  # pytest shows the test's own line
    _check(world_size, backend, timeout_s)
    require_torch("run_on_ranks")
    if backend == "fake":
        return [_call_in_fake_world(function, args, world_size)]
    call = _pickled_call(function, args)
    with (
        tempfile.TemporaryDirectory(prefix="commlens-ranks-") as folder,
        _box_dir() as boxes,
    ):
        ranks: list[Rank] = []
        job = job_dirs.user_folder(boxes) / Path(folder).name
        try:
            for number in range(world_size):
                ranks.append(_start(number, world_size, Path(folder), boxes, call, timeout_s))
            failure = _wait(ranks, job, timeout_s)
        except BaseException:  # raised by pytest-timeout or Ctrl-C
            if not ObserverClient.look():
                print(_verdict(job))
            raise
        finally:
            _end(ranks)
            _print_output(ranks)
        if failure is not None:
            raise failure
        return [rank.value for rank in ranks]


def _check(world_size: int, backend: str, timeout_s: float) -> None:
    __tracebackhide__ = True
    if backend not in BACKENDS:
        raise CommandError(
            f"run_on_ranks has no backend {backend!r}: it takes {' or '.join(BACKENDS)}."
        )
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise CommandError(f"run_on_ranks takes a world_size of at least 1, not {world_size!r}.")
    if not timeout_s > 0:
        raise CommandError(
            f"run_on_ranks takes a timeout_s of more than 0 seconds, not {timeout_s!r}."
        )


@contextlib.contextmanager
def _box_dir() -> Generator[Path, None, None]:
    """Give the folder of the black boxes. Under ``pytest --commlens`` it is the observer's, which
    watches the ranks and removes the boxes.
    """
    observed = Path(os.environ.get("COMMLENS_BOX_DIR", ""))
    if observed.name.startswith(PREFIX):
        yield observed
    else:
        roots = job_dirs.box_roots(None) or [Path(tempfile.gettempdir())]
        with tempfile.TemporaryDirectory(prefix="commlens-ranks-", dir=roots[0]) as folder:
            yield Path(folder)


def _call_in_fake_world(function: Callable[..., Any], args: Sequence[Any], world_size: int) -> Any:
    import torch.distributed as dist

    from commlens.tracing.preview.world import FakeWorld

    if dist.is_initialized():
        raise CommandError(
            "run_on_ranks(backend='fake') needs a process without a process group: call it before"
            " init_process_group or after destroy_process_group."
        )
    with FakeWorld(world_size, 0):
        dist.init_process_group("fake")
        return function(*args)


def _pickled_call(function: Callable[..., Any], args: Sequence[Any]) -> bytes:
    __tracebackhide__ = True
    name = getattr(function, "__qualname__", repr(function))
    try:
        return pickle.dumps((function, tuple(args)))
    except Exception as error:
        if "<locals>" in name or "<lambda>" in name:
            raise CommandError(
                f"run_on_ranks cannot send {name} to the ranks: define it at the top level of its"
                " module, and pass what it needs as arguments."
            ) from None
        raise CommandError(
            f"run_on_ranks cannot send {name} and its arguments to the ranks: {error}."
        ) from None


def _start(
    number: int, world_size: int, folder: Path, boxes: Path, call: bytes, timeout_s: float
) -> Rank:
    settings = config.Settings(
        box_dir=str(boxes), dump_dir=str(folder), job=folder.name, watched=True
    )
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("COMMLENS", "MASTER_", "TORCHELASTIC_"))
    }
    environ |= {name: os.environ[name] for name in config.NOT_SETTINGS if name in os.environ}
    environ |= config.settings_environment(settings) | {config.SWITCH: "1"}
    environ |= {
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
    }
    environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does
    result_file, output_file = folder / f"result{number}", folder / f"output{number}"
    with output_file.open("wb") as output:
        # A session of its own: what the rank starts can be ended with it.
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "commlens.testing.rank_process",
                str(result_file),
                str(folder / "meeting"),
                str(timeout_s),
            ],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environ,
            start_new_session=True,
        )
    assert process.stdin is not None
    # it has ended: _wait says how
    with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
        pickle.dump((os.getpid(), [path or os.getcwd() for path in sys.path], call), stdin)  # noqa: PTH109
    return Rank(number, process, result_file, output_file)


def _wait(ranks: Sequence[Rank], job: Path, timeout_s: float) -> RanksFailed | None:
    """Wait until all ranks have ended, one has failed or the time is over."""
    until = time.monotonic() + timeout_s
    failed: dict[int, FailedRank] = {}
    running = list(ranks)
    while running and time.monotonic() < until:
        time.sleep(_POLL_S)
        for rank in [each for each in running if each.process.poll() is not None]:
            running.remove(rank)
            rank.read_result()
            if rank.failure is not None:
                until = min(until, time.monotonic() + _AFTER_ERROR_S)
                failed[rank.number] = rank.failure
    if failed:
        return _first_failure(failed, _verdict(job))
    if not running:
        return None
    ObserverClient.look()
    verdict = _verdict(job)
    numbers = [rank.number for rank in running]
    words = (
        f"{ranks_phrase(numbers)} {verb(numbers, 'was', 'were')} still running after"
        f" {timeout_s:g} s."
    )
    return RanksFailed(
        f"{capital(words)}\n\n{verdict}".rstrip(),
        rank=verdict.culprits[0] if verdict.culprits else None,
    )


def _first_failure(failed: Mapping[int, FailedRank], verdict: Verdict) -> RanksFailed:
    """Return the error of the rank that failed first: those of the others are often its
    consequences.
    """
    first = min(sorted(failed), key=lambda number: failed[number].at)
    others = sorted(failed.keys() - {first})
    words = f"Rank {first} failed first: {failed[first].words}"
    if others:
        words += f"; after it {ranks_phrase(others)} failed, too"
    text = f"{words}.\n\n{failed[first].traceback}".rstrip()
    # the error says more than a verdict on the same rank
    suffices = first in verdict.culprits and not verdict.kind.startswith("mismatch")
    if suffices or not verdict.is_fault or verdict.confidence == "low":
        return RanksFailed(text, rank=first)
    # it failed because of another rank, as far as the verdict knows one
    rank: int | None = first
    if verdict.culprits:
        rank = verdict.culprits[0]
    elif first in verdict.victims:
        rank = None
    return RanksFailed(f"{text}\n\n{verdict}", rank=rank)


def _verdict(job: Path) -> Verdict:
    from commlens.diagnosis.examine import diagnose_logs
    from commlens.watch.snapshot import snapshot

    return diagnose_logs(snapshot(job))


def _end(ranks: Sequence[Rank]) -> None:
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(rank.process.pid, signal.SIGKILL)  # also what it started
    for rank in ranks:
        with contextlib.suppress(subprocess.TimeoutExpired):
            rank.process.wait(_END_S)


def _print_output(ranks: Sequence[Rank]) -> None:
    """Print what the ranks printed, rank by rank: pytest shows it with a failed test."""
    for rank in ranks:
        with contextlib.suppress(OSError):
            for line in rank.output_file.read_text(encoding="utf-8", errors="replace").splitlines():
                print(f"[rank {rank.number}] {line}")


def assert_replicas_agree(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    group: torch.distributed.ProcessGroup | None = None,
    tolerance: float = 0.0,
    timeout_s: float = 60.0,
) -> None:
    """Assert on all ranks that they have what they must have alike: parameters, buffers, gradients
    and optimizer states. All ranks call it, for example in a function that ``run_on_ranks`` runs.
    The arguments are those of :func:`commlens.check_numbers`.

    Raises:
        AssertionError: ranks differ, or one did not come; with the verdict.
        CommandError: as :func:`commlens.check_numbers`.
    """
    __tracebackhide__ = True  # pytest shows the test's own line
    from commlens.numbers.checks import check_numbers

    verdict = check_numbers(model, optimizer, group=group, tolerance=tolerance, timeout_s=timeout_s)
    if verdict.kind != "healthy" or verdict.missing_evidence:
        raise AssertionError(str(verdict))
