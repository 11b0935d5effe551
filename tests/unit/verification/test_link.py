"""Where the nodes' relays find each other."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from commlens import helper_process
from commlens.verification import link


@pytest.fixture
def short_default_timeout() -> Iterator[None]:
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(0.5)
    yield
    socket.setdefaulttimeout(before)


@pytest.mark.usefixtures("short_default_timeout")
def test_the_relay_reads_from_its_rank_for_as_long_as_it_takes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    blocks: list[bool] = []

    def start(*arguments: str, pass_fds: tuple[int, ...], **more: object) -> None:
        blocks.extend(os.get_blocking(fd) for fd in pass_fds)

    monkeypatch.setattr(helper_process, "start", start)
    monkeypatch.setattr(distributed_c10d, "_get_default_store", dist.HashStore)
    done: Any = SimpleNamespace(link="")
    link._start_relay(tmp_path, 1, done, 4)
    assert blocks == [True]


@pytest.mark.parametrize(
    ("host", "begins"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("localhost", ("127.", "::1")),
        ("", ""),
        ("no-such-host.invalid", ""),
    ],
)
def test_the_address_on_the_way_to_the_store(host: str, begins: Any) -> None:
    assert link._local_address(host).startswith(begins)


@pytest.mark.parametrize(
    ("published", "store_host", "hosts"),
    [
        ("10.0.0.1", "10.0.0.1", ["10.0.0.1"]),
        ("10.0.0.1", "master", ["10.0.0.1", "master"]),
        # Debian's name for the machine itself, or a master pod whose MASTER_ADDR is localhost
        ("127.0.1.1", "master", ["master"]),
        ("127.0.0.1", "127.0.0.1", ["127.0.0.1"]),
        ("10.0.0.1", "", ["10.0.0.1"]),
    ],
)
def test_where_the_hub_is_tried(published: str, store_host: str, hosts: list[str]) -> None:
    assert link._reachable(published, store_host) == hosts


def test_the_host_of_the_store_below_its_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed as dist

    monkeypatch.setenv("MASTER_ADDR", "elsewhere")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert link._store_host(dist.PrefixStore("a", dist.PrefixStore("b", store))) == "127.0.0.1"
    assert link._store_host(dist.HashStore()) == "elsewhere"
