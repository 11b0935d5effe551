"""A forked process that plays one rank of a fake world. It waits where it needs an object or a key
of another rank.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import signal
import socket
import struct
import sys
import tempfile
import time
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from commlens.check.objects import SharedValues
from commlens.check.run_rank import Plan, Run, run_rank
from commlens.check.sequence import RankSequence
from commlens.model.ranklog import End
from commlens.text import signal_name

_OUTPUT_MAX = 200_000  # bytes of a rank's output that are read
_PR_SET_PDEATHSIG = 1
_GRACE_S = 15.0  # after the run's own time limit, until its process is killed
_LINK_S = 10  # the longest pause of a process within a message
_exit = os._exit  # before the program's os._exit is replaced


class Player:
    """A process that plays a rank."""

    def __init__(self, plan: Plan, rank: int, shared: SharedValues) -> None:
        """Fork the process. It has the values that other ranks have shared up to now."""
        self.rank = rank
        self.is_waiting = False
        """Whether it waits for an object or a key of another rank."""
        self._plan = plan
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed by end()
        self._link, its_link = Pipe()
        with socket.socket(fileno=os.dup(self._link.fileno())) as link:
            link.setblocking(True)  # else the program's default timeout holds for the pipe, too
            for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
                link.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", _LINK_S, 0))
        _flush()
        self._pid = os.fork()
        if self._pid == 0:
            with contextlib.suppress(BaseException):
                self._link.close()
                self._play(its_link, shared)
            _exit(1)
        its_link.close()
        self._set_deadline()

    def fileno(self) -> int:
        """Return the descriptor that is readable when the process has sent its run or ended."""
        return self._link.fileno()

    def receive(self) -> Run:
        """Return the run that the process sends when it waits or is complete. If it has died, or
        stops while it sends, return an empty run with the reason.
        """
        try:
            run: Run = pickle.loads(self._link.recv_bytes())
        except BlockingIOError:
            return self._lost_run(f"its process paused for {_LINK_S} s while it sent its sequence")
        except Exception:
            return self._lost_run()
        self.is_waiting = run.needs is not None
        return run

    def resume(self, shared: SharedValues) -> None:
        """Let a waiting process go on, with the values that other ranks have shared."""
        self._set_deadline()
        self.is_waiting = False
        # an error: the process has ended, as receive() will find, or is stopped until it is late
        with contextlib.suppress(OSError):
            _send(self._link, shared)

    def is_late(self) -> bool:
        """Check whether the process must be killed."""
        return time.monotonic() > self._deadline

    def _set_deadline(self) -> None:
        """Set when to kill the process. A run ends by itself before that; its own time limit does
        not count the time for which it waits.
        """
        self._deadline = time.monotonic() + self._plan.timeout_s + _GRACE_S

    def memory(self) -> int:
        """Return the bytes that the process shares with no other one; 0 if they are unknown."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            lines = Path(f"/proc/{self._pid}/smaps_rollup").read_text().splitlines()
            return 1024 * sum(int(each.split()[1]) for each in lines if "Private_" in each)
        return 0

    def kill(self) -> None:
        """Kill the process and its own processes."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)

    def end(self) -> str:
        """Kill and reap the process, and return the program's output. Call nothing afterwards."""
        self.kill()
        os.waitpid(self._pid, 0)
        self._link.close()
        with self._output as output:
            output.seek(max(0, output.seek(0, os.SEEK_END) - _OUTPUT_MAX))
            return output.read().decode(errors="replace")

    def _lost_run(self, problem: str = "") -> Run:
        """Kill the process, and return the empty run of a process that did not send its own.

        Args:
            problem: why it did not; empty: it was late or died.
        """
        late = self.is_late()
        self.kill()
        status = os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOWAIT)  # end() reaps it
        sequence = RankSequence(self.rank, self._plan.world_size, end=End.KILLED)
        sequence.problem = problem or (
            f"its run took longer than {self._plan.timeout_s:g} s"
            if late
            else f"its run ended early ({_status_words(status)})"
        )
        return Run(sequence, {}, {}, {}, {})

    # --- in the forked process

    def _play(self, link: Connection, shared: SharedValues) -> None:
        os.setpgid(0, 0)  # so that kill() reaches the processes that the program starts
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(self._output.fileno(), 1)
        os.dup2(self._output.fileno(), 2)
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a forked process cannot use a GPU

        def wait(run: Run) -> None:
            _flush()
            _send(link, run)
            shared.update(pickle.loads(link.recv_bytes()))

        run = run_rank(self._plan, self.rank, shared, wait)
        _flush()
        _send(link, run)
        os.killpg(0, signal.SIGKILL)


def _flush() -> None:
    for file in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the program may have closed it
            file.flush()


def _send(link: Connection, message: Run | SharedValues) -> None:
    link.send_bytes(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))


def _status_words(result: os.waitid_result | None) -> str:
    assert result is not None  # waited for without WNOHANG
    if result.si_code == os.CLD_EXITED:
        return f"exit status {result.si_status}"
    return signal_name(result.si_status)
