"""The folders of jobs."""

from __future__ import annotations

import subprocess
import sys

from commlens.blackbox import job_dirs


def test_a_jobs_name_does_not_depend_on_the_parent() -> None:
    """Rank 0 may start the others, or a shell each of them: the place where they meet is the same."""
    program = (
        "import sys; from commlens.blackbox import job_dirs; print(job_dirs.job_identity({},"
        " sys.argv[1]))"
    )

    def name(place: str) -> str:
        return subprocess.run(
            [sys.executable, "-c", program, place], capture_output=True, text=True, check=True
        ).stdout.strip()

    assert (
        job_dirs.job_identity({}, "tcp://127.0.0.1:29500")
        == name("tcp://127.0.0.1:29500")
        != name("tcp://127.0.0.1:29501")
    )
    assert job_dirs.job_identity({}) == name(""), "what one command of a shell starts"
