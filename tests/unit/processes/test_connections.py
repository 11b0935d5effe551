"""Tests of src/commlens/processes/connections.py: real sockets of processes of this test."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from commlens.processes.connections import links_between, port_of, tcp_rows

CONNECT = "import socket, sys; s = socket.create_connection(('{}', {})); print(); sys.stdin.read()"


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
@pytest.mark.parametrize("chosen", [0, 24617])
def test_processes_at_the_two_ends_of_a_connection(
    family: socket.AddressFamily, chosen: int
) -> None:
    """A server that listens on IPv6 has IPv4 clients, too, as a TCPStore has."""
    with socket.socket(family) as server:
        try:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("::" if family is socket.AF_INET6 else "127.0.0.1", chosen))
        except OSError:
            pytest.skip("this machine has no such address")
        server.listen()
        port = server.getsockname()[1]
        command = [sys.executable, "-c", CONNECT.format("127.0.0.1", port)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen(command, **pipes) as one, subprocess.Popen(command, **pipes) as other:
            clients = [server.accept()[0] for _ in range(2)]
            for child in (one, other):
                assert child.stdout is not None
                child.stdout.readline()
            found = links_between([one.pid, os.getpid(), other.pid])
            mine = {tuple(sorted((os.getpid(), child.pid))): not chosen for child in (one, other)}
            assert found == mine, "the clients are not connected with each other"
            assert links_between([one.pid, other.pid]) == {}
            for child in (one, other):
                child.communicate()
            for client in clients:
                client.close()


def test_a_socket_that_listens() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        mine = [
            row for row in tcp_rows(os.getpid()) if row.inode == os.fstat(server.fileno()).st_ino
        ]
        assert [port_of(row.local) for row in mine] == [server.getsockname()[1]]


def test_a_process_that_has_ended_has_no_connections() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait()
    assert links_between([child.pid, os.getpid()]) == {}
