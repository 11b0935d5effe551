"""The stacks of processes that ranks started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from commlens.blackbox import job_dirs
from commlens.blackbox.rank_claims import RankClaim
from commlens.model.ranklog import End, Observation
from commlens.processes import pyspy
from commlens.watch.helper_stacks import HelperStacks
from commlens.watch.roster import Member

CODE = "import time\ndef wait():\n    print(1, flush=True)\n    time.sleep(60)\nwait()"


class Box:
    def __init__(self, path: Path) -> None:
        self.path = path


def test_the_stack_of_a_living_helper_is_read_and_kept_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if pyspy.find() is None:
        pytest.skip("py-spy is not installed")
    child = subprocess.Popen([sys.executable, "-c", CODE], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        child.stdout.readline()
        claim = RankClaim(0, "0123abcd", child.pid, job_dirs.start_ticks(child.pid), os.getpid())
        (tmp_path / f".claim-{'-'.join(map(str, claim))}").touch()
        member = Member(os.getpid(), 0, 0, 1, 0, 0, None, True)  # type: ignore[arg-type]
        member.box = Box(tmp_path / "rank0.1.box")  # type: ignore[assignment]
        stacks, seen = HelperStacks(), {os.getpid(): Observation(End.RUNNING)}
        stacks.add([member], seen)
        (helper,) = seen[os.getpid()].helpers
        assert (helper.pid, helper.group) == (child.pid, "0123abcd")
        assert [frame.function for frame in helper.stack] == ["wait", "<module>"]
        monkeypatch.setattr(pyspy, "take", None)  # not called again so soon
        stacks.add([member], seen)
        assert seen[os.getpid()].helpers == [helper]
    finally:
        child.kill()
        child.communicate()
    stacks.add([member], seen)
    assert seen[os.getpid()].helpers == []
