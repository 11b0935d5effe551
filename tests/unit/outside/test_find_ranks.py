"""What is known of processes from their command lines."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from commlens.errors import CommandError
from commlens.outside import find_ranks
from commlens.outside.find_ranks import (
    FoundWorld,
    find_worlds,
)
from commlens.processes.process import script_of, short_command_of
from commlens.processes.ranks import RankProcess


@pytest.mark.parametrize(
    ("command", "script"),
    [
        ("/usr/bin/python -u /home/me/train.py --lr 0.1", "train.py --lr 0.1"),
        ("python -m train.main --lr 0.1", "train.main --lr 0.1"),
        ("python -c import torch\\nprint(-m) --lr 0.1", "python -c '...'"),
        ("python -u -Bc import torch", "python -c '...'"),
        ("python -W ignore -c import torch", "python -c '...'"),
        ("python -W ignore -X dev -u /home/me/train.py -W 3", "train.py -W 3"),
        ("python -Wignore -uX importtime -m train.main", "train.main"),
        ("python -Xtracemalloc train.py --lr 0.1", "train.py --lr 0.1"),
        ("python -um train.main", "train.main"),
        ("java " + "-XX:+A " * 40 + "-jar x.jar", "x.jar"),
        ("python - --lr 0.1", "python - --lr 0.1"),
        ("ray::Worker", "ray::Worker"),
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


@pytest.mark.parametrize(
    ("scripts", "wanted", "said"),
    [
        (
            ["train.py", "train.py", "serve.py --port 80"],
            None,
            "Several jobs run on this machine: ranks 0-1 of train.py (pid 41); ranks 0-1 of"
            " train.py (pid 51); ranks 0-1 of serve.py --port 80 (pid 61). Name one by its script,"
            " such as serve.py, or by the pid of a rank.",
        ),
        (
            ["train.py", "train.py"],
            "train",
            "Several jobs that match 'train' run on this machine: ranks 0-1 of train.py (pid 41);"
            " ranks 0-1 of train.py (pid 51). Name one by the pid of a rank.",
        ),
        # the name of the one is in the command of the other
        (["train.py", "pretrain.py"], None, "such as pretrain.py, or by the pid of a rank."),
        (["train.py"] * 11, None, "ranks 0-1 of train.py (pid 111); 3 more. Name one by the pid"),
    ],
)
def test_several_jobs_and_how_to_name_one(monkeypatch, scripts, wanted, said):
    jobs = [
        FoundWorld(
            [RankProcess(rank, pid + rank, 1, 2, rank, command=f"python {s}") for rank in (0, 1)],
            [],
        )
        for pid, s in zip(range(41, 1000, 10), scripts, strict=False)
    ]
    monkeypatch.setattr(find_ranks, "all_worlds", lambda: jobs)
    monkeypatch.setattr(find_ranks, "links_between", lambda _: {})
    with pytest.raises(CommandError) as refused:
        find_worlds(wanted)
    assert said in str(refused.value)
    if wanted is None and len(scripts) == 3:
        assert find_worlds("serve.py") == [jobs[2]]


@pytest.mark.parametrize("mine", [0, 1])
def test_of_two_processes_of_one_rank_the_preferred_one_counts(monkeypatch, mine):
    """Two launchers started the same job; one of them is asked about."""
    environ = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "29500"}
    with (
        subprocess.Popen(["cat"], stdin=subprocess.PIPE) as one,
        subprocess.Popen(["cat"], stdin=subprocess.PIPE) as other,
    ):
        pids = one.pid, other.pid
        monkeypatch.setattr(
            find_ranks, "python_processes", lambda: [(pid, environ) for pid in pids]
        )
        (job,) = find_ranks.all_worlds({pids[mine]})
        assert [each.pid for each in job.ranks] == [pids[mine]]
        for child in (one, other):
            child.communicate()


@pytest.mark.parametrize(
    ("links", "wanted", "found"),
    [
        ([(42, 51), (52, 61)], None, [41, 51, 61]),
        ([(42, 51), (52, 61)], "rollout", [51, 41, 61]),
        ([(42, 51)], "trainer", [41, 51]),
        ([(42, 51)], "rollout", [51, 41]),
        ([(42, 51)], "serve", [61]),
        ([], "rollout", [51]),
        ([(42, 51)], None, None),
    ],
)
def test_jobs_that_are_connected_are_worlds_of_one(monkeypatch, links, wanted, found):
    jobs = [
        FoundWorld(
            [RankProcess(rank, pid + rank, 1, 2, rank, command=f"python {s}") for rank in (0, 1)],
            [],
        )
        for pid, s in ((41, "rl.py trainer"), (51, "rl.py rollout"), (61, "serve.py"))
    ]
    monkeypatch.setattr(find_ranks, "all_worlds", lambda: jobs)
    monkeypatch.setattr(find_ranks, "links_between", lambda _: dict.fromkeys(links, False))
    if found is None:
        with pytest.raises(CommandError, match="Several jobs run on this machine"):
            find_worlds(wanted)
    else:
        assert [job.ranks[0].pid for job in find_worlds(wanted)] == found


def test_the_name_of_a_world(monkeypatch):
    environ = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "1"}
    named = {"COMMLENS_WORLD": "actor", "REPLICA_GROUP_ID": "1", "MASTER_PORT": "2"}
    replica = {"REPLICA_GROUP_ID": "1", "MASTER_PORT": "3"}
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        each = [(child.pid, environ | own) for own in ({}, named, replica)]
        monkeypatch.setattr(find_ranks, "python_processes", lambda: each)
        assert sorted(world.name for world in find_ranks.all_worlds()) == ["", "actor", "replica 1"]
        child.communicate()
