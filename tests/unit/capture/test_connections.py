"""A group's connections are found as the sockets that are new after it was made, and closed at both
ends, but no others.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from commlens.capture import connections


class Group:
    """Like a process group of gloo, whose ``abort`` does nothing."""

    def abort(self) -> None:
        pass

    def rank(self) -> int:
        return 0


def pair() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a TCP connection between two ephemeral ports, as gloo's are."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = socket.create_connection(server.getsockname())
        there, _ = server.accept()
    return here, there


@pytest.fixture
def earlier() -> Iterator[tuple[socket.socket, socket.socket]]:
    here, there = pair()
    with here, there:
        yield here, there


def works(ends: tuple[socket.socket, socket.socket]) -> bool:
    ends[0].sendall(b"x")
    ends[1].settimeout(10)
    return ends[1].recv(1) == b"x"


def test_only_the_groups_own_connections_are_closed(
    earlier: tuple[socket.socket, socket.socket],
) -> None:
    group = Group()
    before = connections.sockets()
    (here, there), closed, listening = pair(), pair(), socket.create_server(("127.0.0.1", 0))
    connections.note(group, before)
    numbers = {end.fileno() for end in closed}
    for end in closed:
        end.close()
    later = pair()
    with here, there, listening, later[0], later[1]:
        assert numbers & {end.fileno() for end in later}, "a descriptor is used again"
        connections.abort(group)
        there.settimeout(10)
        assert there.recv(1) == b""
        assert works(later)
        assert works(earlier)
        socket.create_connection(listening.getsockname(), timeout=10).close()


def test_the_store_and_local_sockets_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group()
    before = connections.sockets()
    local, store, own = socket.socketpair(), pair(), pair()
    connections.note(group, before)
    monkeypatch.setattr(connections, "_store_port", lambda: store[1].getsockname()[1])
    with local[0], local[1], store[0], store[1], own[0], own[1]:
        connections.abort(group)
        assert works(local)
        assert works(store)
        own[1].settimeout(10)
        assert own[1].recv(1) == b""


def test_a_group_that_was_made_before_recording_is_left_alone(
    earlier: tuple[socket.socket, socket.socket],
) -> None:
    connections.abort(Group())
    assert works(earlier)


def test_a_rank_that_is_no_member_of_a_group_has_no_group() -> None:
    connections.note(-100, {})  # torch's GroupMember.NON_GROUP_MEMBER
