"""The client of NCCL's RAS service, against a server that speaks its protocol."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from node_files import RasServer, communicator

from commlens.health import ras
from commlens.model.health import RasRank, RasReport

ANSWERS = Path(__file__).parent / "ras_answers"

TEXT = """NCCL version 2.24.3 compiled with CUDA 12.8
CUDA runtime version 12080, driver version 12080

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      2          4            1          8        8

Communicators... (0.00s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         2         4         8         8   RUNNING  INCOMPLETE,MISMATCH

Errors
======

#0-0 (27a079b828ff1a75) INCOMPLETE
  Missing communicator data from 1 rank
  Rank 6 -- GPU 2 managed by process 2006 on node 10.28.6.21

Warnings
========

#0-0 (27a079b828ff1a75) MISMATCH
  Communicator ranks have different AllReduce operation counts
  6 ranks have launched up to operation 6650
  Rank 3 has launched up to operation 6649 -- GPU 3 managed by process 1003 on node 10.28.6.20

"""


def test_json_names_the_ranks_that_are_behind_or_do_not_answer() -> None:
    told = communicator([11, 12, 13, 14], [40, 40, 39, 40], silent=(3,))
    with RasServer([told]) as server:
        report = ras.ask(server.environment)
    assert report.answered and report.version == "2.28.3"
    (found,) = report.communicators
    assert (found.size, found.pids, found.op, found.apart) == (
        4,
        [11, 12, 13, 14],
        "AllReduce",
        True,
    )
    assert found.behind == [RasRank(2, 13, "10.0.0.1")]
    assert found.silent == [RasRank(3, 14, "10.0.0.1")]
    assert server.commands == [
        "client protocol 2",
        "timeout 2",
        "set format json",
        "verbose status",
    ]


def test_json_without_a_difference_names_nobody() -> None:
    with RasServer([communicator([11, 12], [40, 40])]) as server:
        (found,) = ras.ask(server.environment).communicators
    assert not found.apart and not found.behind and not found.silent


def test_an_older_nccl_answers_in_text() -> None:
    with RasServer(text=TEXT) as server:
        report = ras.ask(server.environment)
    assert report.answered and report.version == "2.24.3"
    (found,) = report.communicators
    assert (found.name, found.op, found.apart) == ("27a079b828ff1a75", "AllReduce", True)
    assert found.behind == [RasRank(3, 1003, "10.28.6.20")]
    assert found.silent == [RasRank(6, 2006, "10.28.6.21")]


def test_ranks_that_launched_nothing_are_listed_in_text() -> None:
    section = """NCCL version 2.26.2 compiled with CUDA 12.8
#0-0 (1a) MISMATCH
  Communicator ranks have different AllGather operation counts
  14 ranks have launched up to operation 2
  2 ranks have not launched any operations
  Rank 4 -- GPU 4 managed by process 44 on node 10.0.0.1
  Rank 5 -- GPU 5 (NVML 1) managed by process 45 on node 10.0.0.1
"""
    (found,) = ras.read_text(section).communicators
    assert [(rank.rank, rank.pid) for rank in found.behind] == [(4, 44), (5, 45)]


def test_too_many_ranks_are_apart_without_names() -> None:
    section = """NCCL version 2.26.2 compiled with CUDA 12.8
#0-0 (1a) MISMATCH
  Communicator ranks have different AllGather operation counts
  20 ranks have launched up to operation 2
  20 ranks have launched up to operation 1
"""
    (found,) = ras.read_text(section).communicators
    assert found.apart and not found.behind


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ("", ("localhost", 28028)),
        ("localhost:4000", ("localhost", 4000)),
        ("[::1]:4000", ("::1", 4000)),
        ("nonsense", ("localhost", 28028)),
    ],
)
def test_the_address(named: str, expected: tuple[str, int]) -> None:
    assert ras.address({"NCCL_RAS_ADDR": named}) == expected


def test_only_this_machine_is_asked_unless_told_otherwise() -> None:
    report = ras.ask({"NCCL_RAS_ADDR": "192.0.2.1:28028"})
    assert not report.answered and "loopback" in report.problem


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    report = ras.ask({"NCCL_RAS_ADDR": f"127.0.0.1:{port}"})
    assert not report.answered and report.problem == "Connection refused"


def test_another_service_is_recognised() -> None:
    def greet(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection:
            connection.recv(100)
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    import threading

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=greet, args=(listening,))
        thread.start()
        report = ras.ask({"NCCL_RAS_ADDR": f"127.0.0.1:{listening.getsockname()[1]}"})
        thread.join(5)
    assert not report.answered and "not NCCL's" in report.problem


def test_a_service_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ras, "_ANSWER_S", 0.2)
    with RasServer([], answers=False) as server:
        report = ras.ask(server.environment)
    assert not report.answered and "did not answer" in report.problem


def test_an_answer_that_is_cut_is_none() -> None:
    with RasServer(text="NCCL vers") as server:
        report = ras.ask(server.environment)
    assert not report.answered and "cannot be read" in report.problem


@pytest.mark.parametrize(("read", "ending"), [(ras.read_json, "json"), (ras.read_text, "txt")])
def test_answers_of_a_real_job(read: Callable[[str], RasReport], ending: str) -> None:
    """NCCL 2.28.9, two ranks under FSDP2 on one H200: while they train, and while rank 1 sleeps."""
    healthy, hung = (
        read((ANSWERS / f"{name}.{ending}").read_text()) for name in ("healthy", "hung")
    )
    assert healthy.version == hung.version == "2.28.9"
    assert not any(one.apart or one.behind or one.silent for one in healthy.communicators)
    (found,) = hung.communicators
    assert (found.op, found.apart, found.silent) == ("AllGather", True, [])
    assert found.behind == [RasRank(1, 897, "127.0.0.1")]
