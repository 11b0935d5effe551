"""What is known of processes from their command lines."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from commlens.outside.find_ranks import script_of, short_command_of


@pytest.mark.parametrize(
    ("command", "script"),
    [
        ("/usr/bin/python -u /home/me/train.py --lr 0.1", "train.py --lr 0.1"),
        ("python -m train.main --lr 0.1", "train.main --lr 0.1"),
        ("python -c import torch\\nprint(-m) --lr 0.1", "python -c '...'"),
        ("python -u -Bc import torch", "python -c '...'"),
        ("python train.py -c config.yaml", "train.py -c config.yaml"),
        (f"python train.py {'x' * 71}", f"train.py {'x' * 71}"),
        (f"python train.py {'x' * 72}", f"train.py {'x' * 71}..."),
    ],
)
def test_the_script_of_a_command_line(command, script):
    assert script_of(command) == script


def test_code_on_a_command_line_is_not_repeated_in_messages():
    code = "import sys\nsys.stdin.read()"
    with subprocess.Popen([sys.executable, "-u", "-c", code], stdin=subprocess.PIPE) as child:
        assert until_executed(child) == f"{sys.executable} -u -c '...'"
        child.communicate()
    with subprocess.Popen([sys.executable, "-"], stdin=subprocess.PIPE) as child:
        assert until_executed(child) == f"{sys.executable} -"
        child.communicate()


def until_executed(child: subprocess.Popen[bytes]) -> str:
    """Return the command line once the kernel shows it: for a moment after exec, there is none."""
    end = time.monotonic() + 10
    while not (found := short_command_of(child.pid)) and time.monotonic() < end:
        time.sleep(0.01)
    return found
