"""For how long a process could have run."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from commlens.verification.ready_clock import STARVED, ReadyClock

pytestmark = pytest.mark.launches

S = 1_000_000_000
SPINS = "print(flush=True)\nwhile True: pass"


@contextlib.contextmanager
def started(code: str) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process
        finally:
            process.kill()


def test_time_in_which_a_thread_had_no_core_does_not_count() -> None:
    core = {min(os.sched_getaffinity(0))}
    with started(SPINS) as late, started(SPINS) as neighbour:
        os.setpriority(os.PRIO_PROCESS, late.pid, 19)
        clock = ReadyClock()
        clock.watch([late.pid])
        for each in (late, neighbour):
            os.sched_setaffinity(each.pid, core)
        time.sleep(1)
        # a second, however late this test itself is on a busy machine
        assert not clock.is_over(S // 2, [late.pid], S)
        assert clock.is_over(S // 2, [])
        assert clock.is_over(S // 2, [late.pid], (STARVED + 1) * S), "no wait is endless"


def test_a_sleep_counts_and_a_process_that_is_gone_does_not_prolong_it() -> None:
    with started("import time\nprint(flush=True)\ntime.sleep(60)") as late:
        clock = ReadyClock()
        clock.watch([late.pid])
        assert not clock.is_over(S, [late.pid], 0.9 * S)
        assert clock.is_over(S, [late.pid], 2 * S)
        late.kill()
        late.wait()
        assert clock.is_over(S, [late.pid], 2 * S)
