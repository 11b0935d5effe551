"""The uncaught exception of a rank, in its black box and in torchelastic's error file."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import re
import stat
import sys
import threading
import traceback
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from commlens import error_file
from commlens.blackbox import job_dirs
from commlens.blackbox import layout as L
from commlens.errors import DistributedOperationException
from commlens.model.device_assertion import ASSERTED, parse_device_assertion

_RAY_THREAD_RUNNER = "ray.train.v2._internal.execution.worker_group.thread_runner"
_RAY_CATCHES = "construct_user_exception_with_traceback"
_ORIGINAL = "Original Traceback (most recent call last):\n"
_FRAME = re.compile(r'^  File "(.+)", line (\d+), in (.+)$', re.MULTILINE)
# torch 2.0 to 2.15
_RANK_TRACE = re.compile(r"^Traceback \(most recent call last\): \(RANK (\d{1,7})\)$", re.MULTILINE)
_RANK_ERRORS_MAX = 3
_THREAD_ERRORS_MAX = 16  # places
_STDERR = 2
_STDERR_READ = 256 * 1024  # bytes, from the end; a line has about 150
# the scenarios are user programs
_OURS = re.compile(re.escape(str(Path(__file__).parents[1])) + "/(?!scenarios/)")


def record_exception(
    writer: Any, kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Write an uncaught exception into the black box, and a refusal also into torchelastic's error
    file.

    The message of a refusal is the same on all ranks: the first rank of a node that ends with it
    prints it; the other ranks only refer to that rank.
    """
    refusal = _refusal_in(error)
    frames = [[f.filename, f.lineno or 0, f.name] for f in reversed(traceback.extract_tb(trace))]
    first = _of_worker(str(error))
    if first is not None:
        text, frames = first[0], [*first[1], *frames]
    else:
        message = " ".join(str(error).split()) if refusal is error else _first_line(error)
        own = job_dirs.box_rank(writer.path), _checkpoint_file(trace)
        message = message[:500] + _of_ranks(str(error), *own)
        text = _headline(kind, message)
        text += _last_error(str(error)) + _killed_worker(error)
    blob = {"k": "exception", "text": text, "f": frames[:64]}
    if ASSERTED in text and (assertion := _only_assertion()):
        blob["assertion"] = assertion
    position = 0
    if isinstance(refusal, DistributedOperationException) and refusal.refusal:
        position = writer.add_blob({**blob, "refusal": refusal.refusal})
    writer.word(L.EXCEPTION, position or writer.add_blob(blob))  # it may be too large with it
    if refusal is None:
        return
    message, teller = str(refusal), None
    if isinstance(refusal, DistributedOperationException) and refusal.refusal:
        teller = _teller(writer.path, message)
    if teller is not None:
        first_line = message.splitlines()[0]
        refusal.args = (f"{first_line} (The whole message is in the output of {teller}.)",)
    error_file.write(os.environ, str(refusal), earliest=teller is None)


def _headline(kind: type[BaseException], message: str) -> str:
    return f"{kind.__name__}: {message}" if message else kind.__name__


def _first_line(error: BaseException | None) -> str:
    return next(iter(str("" if error is None else error).strip().splitlines()), "")


def _teller(box: Path, message: str) -> str | None:
    """Claim the message of a refusal for the rank of this box; return the rank that claimed it
    before.
    """
    claim = box.parent / f"{job_dirs.TOLD}{zlib.crc32(message.encode()):08x}"
    mine = claim.with_name(f"{claim.name}-{os.getpid()}")
    try:
        mine.write_text(f"rank {job_dirs.box_rank(box)}")
        os.link(mine, claim)  # with its content at once
    except FileExistsError:
        return claim.read_text()
    except OSError:
        return None
    finally:
        with contextlib.suppress(OSError):
            mine.unlink()
    return None


def _of_worker(text: str) -> tuple[str, list[list[Any]]] | None:
    """Return the exception of a data loader's worker process, which torch raises again with the
    worker's traceback as its text.

    Returns:
        The exception in one line, and its frames, innermost first; None if the text is another one.
    """
    head, found, trace = text.partition(_ORIGINAL)
    frames = list(_FRAME.finditer(trace))
    if not found or not frames:
        return None
    after = trace[frames[-1].end() :].splitlines()  # source lines are indented
    error = next(
        (line for line in after if line.strip() and not line.startswith(" ")),
        "an exception without a text",
    )
    where = head.partition(" in ")[2].strip().rstrip(".")
    return f"{error[:500]} (in {where})", [
        [frame[1], int(frame[2]), frame[3]] for frame in reversed(frames)
    ]


def _only_assertion() -> str:
    """Return the assertion that failed in a kernel. CUDA prints it to stderr before torch raises
    its error. Empty if stderr is no file, or holds several assertions: ranks may share it.
    """
    try:
        about = os.fstat(_STDERR)
        if not stat.S_ISREG(about.st_mode):
            return ""
        with Path(f"/proc/self/fd/{_STDERR}").open("rb") as file:  # ours may be write-only
            file.seek(max(0, about.st_size - _STDERR_READ))
            lines = file.read(_STDERR_READ).decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    found = {assertion for line in lines if (assertion := parse_device_assertion(line))}
    return found.pop() if len(found) == 1 else ""


def _last_error(text: str) -> str:
    """Return NCCL's last error in the text of an exception, which tells what happened, and the line
    "Last error:" before it; empty if there is none.
    """
    _, found, after = text.partition("\nLast error:\n")
    line = next(iter(after.splitlines()), "").strip()
    return f"{found}{line[:500]}" if line else ""


def _killed_worker(error: BaseException) -> str:
    """Return the error that names the signal that killed a data loader's worker, if the exception
    itself says only that the worker exited.
    """
    cause = str(error.__cause__ or "")
    return f"\ncaused by {cause.splitlines()[0][:500]}" if "DataLoader worker" in cause else ""


def _checkpoint_file(trace: TracebackType | None) -> str:
    """Return the file that this rank could not read or write in a distributed checkpoint; empty if
    it is not known.

    The checkpoint's exception is raised after all ranks have exchanged theirs. Its frames still
    hold this rank's own one.
    """
    for frame in _frames_in(trace, "torch/distributed/checkpoint/utils.py"):
        for value in frame.f_locals.values():
            error = value[0] if isinstance(value, tuple) and value else None
            if not isinstance(error, BaseException):
                continue
            for inner in _frames_in(
                error.__traceback__, "torch/distributed/checkpoint/filesystem.py"
            ):
                file = inner.f_locals.get("new_path")
                if isinstance(file, (str, os.PathLike)):
                    return os.fspath(file)[:500]
    return ""


def _frames_in(trace: TracebackType | None, file: str) -> list[FrameType]:
    """Return the frames of a traceback that are in a file."""
    return [
        frame for frame, _ in traceback.walk_tb(trace) if frame.f_code.co_filename.endswith(file)
    ]


def _of_ranks(text: str, own: int, file: str) -> str:
    """Return the errors of ranks that a distributed checkpoint's exception contains: ``" (RANK 1)
    EOFError: Ran out of input"``.

    Each follows a line with the rank and the frames, which are indented.

    Args:
        text: of the exception.
        own: this rank.
        file: that this rank could not read or write; empty if unknown.
    """
    found = []
    for head in list(_RANK_TRACE.finditer(text))[:_RANK_ERRORS_MAX]:
        after = text[head.end() :].splitlines()
        error = next((line for line in after if line.strip() and not line.startswith(" ")), "")
        of_file = f" (file {file})" if file and head[1] == str(own) else ""
        found.append(f" (RANK {head[1]}){of_file} {error[:500]}")
    return ";".join(found)


def hook(
    record: Callable[[type[BaseException], BaseException, TracebackType | None], None],
) -> None:
    """Call ``record`` for an exception that ends the program; again after a program has replaced
    ``sys.excepthook``.
    """
    previous = sys.excepthook
    if getattr(previous, "record", None) == record:
        return  # the hook is this recording's: not replaced since, nor inherited by a forked child

    def commlens_excepthook(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        record(kind, error, trace)
        previous(kind, error, error.__traceback__ or trace)

    commlens_excepthook.record = record  # type: ignore[attr-defined]
    sys.excepthook = commlens_excepthook


def hook_threads(record: Callable[[threading.ExceptHookArgs], None]) -> None:
    """Call ``record`` for an exception that ends a thread beside the main one."""
    previous = threading.excepthook
    if getattr(previous, "record", None) == record:
        return

    def commlens_thread_hook(args: threading.ExceptHookArgs) -> None:
        if not issubclass(args.exc_type, SystemExit):
            record(args)
        previous(args)

    commlens_thread_hook.record = record  # type: ignore[attr-defined]
    threading.excepthook = commlens_thread_hook


def record_thread(writer: Any, ended: threading.ExceptHookArgs, places: set[Any]) -> None:
    """Write the exception that ended a thread into the black box, the first time at each place:
    some programs start threads that fail again and again.
    """
    trace = list(traceback.walk_tb(ended.exc_traceback))[::-1][:16]
    frames = [(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in trace]
    place = (ended.exc_type, *frames[:1])
    if place in places or len(places) >= _THREAD_ERRORS_MAX:
        return
    places.add(place)
    name = f" (in thread {ended.thread.name})" if ended.thread is not None else ""
    first = _first_line(ended.exc_value)[:500]
    blob = {"k": "exception", "text": _headline(ended.exc_type, first) + name, "f": frames}
    writer.word(L.THREAD_EXCEPTION, writer.add_blob(blob))


def hook_multiprocessing(
    record: Callable[[type[BaseException], BaseException, TracebackType | None], None],
) -> None:
    """Call ``record`` for the exception that ends a child of multiprocessing, on Python 3.13.

    ``BaseProcess._bootstrap`` prints the exception, and only then are finalizers run there; before,
    they ran while it was raised.
    """
    original = traceback.print_exc
    if (
        sys.version_info < (3, 13)
        or multiprocessing.parent_process() is None
        or getattr(original, "record", None) == record
    ):
        return

    @functools.wraps(original)
    def print_exc(*args: Any, **kwargs: Any) -> None:
        kind, error, trace = sys.exc_info()
        if (
            sys._getframe(1).f_code is multiprocessing.process.BaseProcess._bootstrap.__code__
            and kind is not None
            and error is not None
        ):
            record(kind, error, trace)
        original(*args, **kwargs)

    print_exc.record = record
    traceback.print_exc = print_exc


def hook_ray_train(
    record: Callable[[type[BaseException], BaseException, TracebackType | None], None],
) -> None:
    """Call ``record`` for an exception of Ray Train's training function (tried with Ray 2.60).

    Ray runs the function in a thread, catches its exception and ends all workers: no other trace of
    it is in this process.
    """
    runner: Any = sys.modules.get(_RAY_THREAD_RUNNER)
    original = getattr(runner, _RAY_CATCHES, None)
    if original is None or getattr(original, "record", None) == record:
        return

    @functools.wraps(original)
    def caught(error: BaseException, *args: Any, **kwargs: Any) -> Any:
        record(type(error), error, error.__traceback__)
        return original(error, *args, **kwargs)

    caught.record = record  # type: ignore[attr-defined]
    setattr(runner, _RAY_CATCHES, caught)


def hide_our_frames(error: BaseException) -> None:
    """Take commlens's frames out of the traceback of an exception, and of those that it was raised
    from.
    """
    for seen in _chain(error):
        frames = []
        trace = seen.__traceback__
        while trace is not None:
            if not _OURS.match(trace.tb_frame.f_code.co_filename):
                frames.append(trace)
            trace = trace.tb_next
        if frames:
            for frame, following in zip(frames, [*frames[1:], None], strict=True):
                frame.tb_next = following
            seen.__traceback__ = frames[0]


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and those that it was raised from."""
    for _ in range(10):
        if error is not None:
            yield error
            error = error.__cause__ or error.__context__


def _refusal_in(error: BaseException) -> BaseException | None:
    """Return the refusal that an exception is or was raised from: ours, or Accelerate's own of the
    same name.
    """
    for seen in _chain(error):
        if isinstance(seen, DistributedOperationException) and seen.kind:
            return seen
        if type(seen).__name__ == "DistributedOperationException" and seen.__cause__ is None:
            return seen
    return None
