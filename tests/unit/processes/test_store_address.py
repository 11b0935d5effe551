"""Tests of src/commlens/processes/store_address.py: this process's own sockets."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from commlens.processes.store_address import look_at_store


@pytest.mark.parametrize(
    ("family", "bound"),
    [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::1")],
)
def test_whether_anybody_listens(family: socket.AddressFamily, bound: str) -> None:
    with socket.socket(family) as server:
        try:
            server.bind((bound, 0))
        except OSError:
            pytest.skip(f"this machine has no {bound}")
        port = str(server.getsockname()[1])
        for listens in (False, True):
            seen = look_at_store(os.getpid(), "localhost", port)
            assert seen is not None
            assert (seen.address, seen.listens) == (f"localhost:{port}", listens)
            server.listen()


@pytest.mark.parametrize(
    ("host", "known"),
    [
        ("localhost", True),
        ("127.0.0.1", True),
        ("[::1]", True),
        (os.uname().nodename, True),
        ("192.0.2.7", False),  # of no host (RFC 5737)
        ("2001:db8::7", False),
        ("node-of-another-rack", False),
    ],
)
def test_nothing_is_claimed_of_other_hosts(host: str, known: bool) -> None:
    assert (look_at_store(os.getpid(), host, "1") is not None) == known


def test_what_cannot_be_read_is_not_claimed() -> None:
    assert look_at_store(2**30, "localhost", "1") is None
    assert look_at_store(os.getpid(), "localhost", "?") is None


@pytest.mark.parametrize(("value", "agent"), [("True", True), ("False", False), (None, False)])
def test_the_launchers_variable(value: str | None, agent: bool) -> None:
    given = {} if value is None else {"TORCHELASTIC_USE_AGENT_STORE": value}
    with subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); input()"],
        env={**os.environ, **given},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        seen = look_at_store(process.pid, "localhost", "1")
        process.communicate(b"\n")
    assert seen is not None and seen.agent == agent
