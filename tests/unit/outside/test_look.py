"""Why stacks cannot be read."""

from __future__ import annotations

import os

from commlens.outside.look import why_refused


def test_a_refusal_names_the_capability_or_the_setting():
    assert (
        "ptrace_scope" in (text := why_refused(os.getpid(), "Permission Denied"))
        or "SYS_PTRACE" in text
    )
    assert (
        why_refused(os.getpid(), "Error: no such process")
        == "py-spy failed: Error: no such process"
    )
