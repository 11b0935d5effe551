"""One rank of :func:`commlens.testing.run_on_ranks`: ``python -m commlens.testing.rank_process
RESULT_FILE MEETING_FILE SECONDS``.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import pickle
import signal
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1


def main(result_file: Path, meeting: str, timeout_s: float) -> int:
    """Read a function call from standard input, run it with a default group, and leave its result
    in a file. Return the exit status.
    """
    parent, path, call = pickle.load(sys.stdin.buffer)
    # a test that is killed leaves no rank behind
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return 1
    sys.path[:] = path
    try:
        try:
            function, args = pickle.loads(call)
        except (ImportError, AttributeError) as error:
            raise ImportError(f"the rank cannot import the function: {error}") from None
        value = _call(function, args, meeting, timeout_s)
        _leave(result_file, {"value": value, "at": time.monotonic()})
        return 0
    except BaseException as error:
        moment = time.monotonic()
        shown = error.__traceback__
        while shown is not None and shown.tb_frame.f_code.co_filename == __file__:
            shown = shown.tb_next
        text = "".join(traceback.format_exception(type(error), error, shown))
        kind = traceback.format_exception_only(type(error), error)[-1].strip().rstrip(".")
        with contextlib.redirect_stderr(io.StringIO()):
            sys.excepthook(type(error), error, shown)  # the hook of commlens records the error
        _leave(result_file, {"error": text, "kind": kind, "at": moment})
        sys.stdout.flush()
        os._exit(1)  # exit handlers may wait, and the other ranks would wait for this one


def _call(function: Any, args: Any, meeting: str, timeout_s: float) -> Any:
    import torch.distributed as dist

    # A longer timeout than the test's: the verdict says more than gloo's error.
    dist.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=timeout_s + 60),
    )
    value = function(*args)
    if dist.is_initialized():
        dist.destroy_process_group()
    return value


def _leave(result_file: Path, result: dict[str, Any]) -> None:
    aside = result_file.with_suffix(".tmp")
    aside.write_bytes(pickle.dumps(result))
    aside.replace(result_file)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])))
