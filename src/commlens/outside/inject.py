"""Switch recording on in the ranks of a running job, through gdb: for ``commlens attach --inject``.

gdb stops a rank for about a second and leaves a call with ``Py_AddPendingCall``, which Python's
main thread makes between two instructions of its program. Nothing runs inside the stopped process,
so it cannot deadlock there. A main thread that is inside a C call makes the call when that returns;
if it has not within :data:`WAIT_S`, there is nothing left to run.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from commlens.errors import CommandError, EvidenceError
from commlens.outside.find_ranks import FoundJob, RankProcess
from commlens.outside.look import why_refused
from commlens.text import capital, ranks_phrase, verb

WAIT_S: Final = 30.0  # for the ranks, which import commlens first
_GDB_S: Final = 60.0
_AT_ONCE: Final = 8
_DONE: Final = "$1 = 0"  # printed by gdb: the call is left
ALREADY: Final = "is recorded already"
_BUSY: Final = (
    f"ran no Python code in the main thread for {WAIT_S:.0f} s, perhaps waiting in a collective:"
    " run this again when the job moves"
)

# Never raises, and leaves no name in the program's __main__.
_CALL: Final = r"try:\n exec(open('{path}').read(), {{}})\nexcept BaseException:\n pass\n"
_CODE: Final = """
import os
try:
    from commlens.launch.joining import join
    answer = join({settings!r})
except ModuleNotFoundError as error:
    import sys
    answer = "finds no module " + str(error.name) + " in " + sys.prefix
    answer += ": install commlens there; the job can go on meanwhile"
except BaseException as error:
    answer = "failed: " + type(error).__name__ + ": " + str(error)
with open({answer!r} + ".part", "w") as file:
    file.write(answer)
os.replace({answer!r} + ".part", {answer!r})
"""


def inject(job: FoundJob, settings: Mapping[str, Any]) -> tuple[list[int], dict[str, list[int]]]:
    """Let all ranks of a job on this machine record their collectives from now on.

    Args:
        job: the ranks.
        settings: those that differ from the defaults.

    Returns:
        The ranks that are recorded from now on; and the others by the reason, in a clause.

    Raises:
        CommandError: gdb is not installed.
        EvidenceError: no rank may be touched.
    """
    gdb = shutil.which("gdb")
    if gdb is None:
        raise CommandError(
            "Recording is switched on in a running process through gdb, which is not installed (on"
            " Debian: apt install gdb). `commlens attach` without --inject needs no gdb."
        )
    failed: dict[str, list[int]] = {}
    recorded: list[int] = []
    with contextlib.ExitStack() as folders:
        answers = {one: folders.enter_context(_answer_of(one, settings)) for one in job.ranks}
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            refusals = dict(
                zip(
                    answers,
                    pool.map(lambda one: _leave_call(gdb, one, answers[one]), answers),
                    strict=True,
                )
            )
        asked = [one for one, why in refusals.items() if why is None]
        if not asked:
            raise EvidenceError(
                f"Recording could not be switched on in {job.label}:"
                f" {next(iter(refusals.values()))}."
            )
        _wait_for([answers[one] for one in asked])
        for one in job.ranks:
            why = refusals[one] if refusals[one] is not None else _read(answers[one])
            if why:
                failed.setdefault(why, []).append(one.rank)
            else:
                recorded.append(one.rank)
    return recorded, failed


def described(job: FoundJob, recorded: Sequence[int], failed: Mapping[str, Sequence[int]]) -> str:
    """Return what was done, in sentences."""
    already = failed.get(ALREADY, ())
    sentences = [
        f"{capital(ranks_phrase(ranks))} {why}." for why, ranks in failed.items() if why != ALREADY
    ]
    if already:
        sentences.insert(
            0, f"{capital(ranks_phrase(already))} {verb(already, 'is', 'are')} recorded already."
        )
    if recorded:
        of = job.label.partition(" of ")[2]
        sentences.insert(
            0,
            f"{capital(ranks_phrase(recorded))} of {of} {verb(recorded, 'is', 'are')} recorded from"
            " now on.",
        )
    if recorded and failed.keys() <= {ALREADY}:
        sentences.append(
            "If the job stalls, the verdict is printed among its own output; `commlens status`"
            " shows it now."
        )
    return " ".join(sentences)


@contextlib.contextmanager
def _answer_of(one: RankProcess, settings: Mapping[str, Any]) -> Iterator[Path]:
    """Make a folder with the code that a rank is to run, in its own file system; yields the file of
    its answer, and removes it all.
    """
    root = Path(f"/proc/{one.pid}/root")
    try:
        shared = root.samefile("/")
        folder = Path(
            tempfile.mkdtemp(prefix="commlens-inject-", dir=None if shared else root / "tmp")
        )
    except OSError as error:
        raise EvidenceError(
            f"Recording could not be switched on in rank {one.rank}: {error.strerror or error}."
        ) from None
    inside = folder if shared else Path("/tmp") / folder.name
    try:
        owner = Path(f"/proc/{one.pid}").stat()
        code = folder / "code.py"
        code.write_text(
            _CODE.format(settings=dict(settings), answer=str(inside / "answer")), encoding="utf-8"
        )
        if os.geteuid() == 0:
            os.chown(code, owner.st_uid, owner.st_gid)
            os.chown(folder, owner.st_uid, owner.st_gid)
        yield folder / "answer"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _leave_call(gdb: str, one: RankProcess, answer: Path) -> str | None:
    """Leave the call that runs the code. Returns why that failed, in a clause; None if it did
    not.
    """
    inside = str(answer.with_name("code.py")).removeprefix(f"/proc/{one.pid}/root")
    call = (
        "print ((int (*)(void*, void*))Py_AddPendingCall)((void*)&PyRun_SimpleString,"
        f' (void*)"{_CALL.format(path=inside)}")'
    )
    # torch's symbols would take a minute
    before = ["set auto-solib-add off", "set auto-load off", "set debuginfod enabled off"]
    after = [
        "set unwindonsignal on",
        "sharedlibrary libpython",
        r"sharedlibrary libc\.so",
        call,
        "detach",
    ]
    command = [
        gdb,
        "-nx",
        "-batch",
        *_each("-iex", before),
        "-p",
        str(one.pid),
        *_each("-ex", after),
    ]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_GDB_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"could not be reached: gdb did not end within {_GDB_S:.0f} s"
    except OSError as error:
        return f"could not be reached: gdb could not be started: {error}"
    if _DONE in done.stdout.splitlines():
        return None
    if "not permitted" in done.stderr:
        return f"could not be reached: {why_refused(one.pid, 'Permission denied')}"
    if "Py_AddPendingCall" in done.stderr:
        return "could not be reached: gdb finds no Python in it"
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return f"could not be reached: gdb failed: {(lines or ['no reason given'])[-1][:200]}"


def _each(option: str, values: Sequence[str]) -> list[str]:
    return [part for value in values for part in (option, value)]


def _wait_for(answers: Sequence[Path]) -> None:
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end and not all(answer.exists() for answer in answers):
        time.sleep(0.05)


def _read(answer: Path) -> str:
    try:
        return answer.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return _BUSY
