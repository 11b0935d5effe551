"""Groups that a program makes by hand: which they are, and what a process knows of them."""

from __future__ import annotations

import datetime
import socket
from collections.abc import Iterator

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo
from torch.distributed import distributed_c10d as c10d

from commlens.tap import hand_made
from commlens.tap.groups import LiveGroup, global_ranks, memberships

WAIT = datetime.timedelta(seconds=60)


@pytest.fixture(autouse=True)
def hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hooks of a process that is recorded."""
    for owner, name in ((dist.PrefixStore, "__init__"), (dist.ProcessGroup, "_register_backend")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # put back after the test
    hand_made.hook_stores_and_groups(hand_made.note_backend)


@pytest.fixture
def default_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def bare(store: dist.Store) -> dist.ProcessGroup:
    """A group as vLLM makes it."""
    group, backend = dist.ProcessGroup(store, 0, 1), ProcessGroupGloo(store, 0, 1)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return group


def tcp_store(host: str = "127.0.0.1") -> dist.TCPStore:
    return dist.TCPStore(host, 0, 1, True, wait_for_workers=False)


def test_a_bare_group_has_no_global_ranks(default_group: None) -> None:
    store = tcp_store()
    group = bare(dist.PrefixStore("inner", dist.PrefixStore("outer/", store)))
    known = LiveGroup(group, 0, {})
    name = f"localhost:{store.port}/outer/inner"
    assert (known.ranks, known.size, known.name) == ((), 1, "")
    assert known.hand_made == hand_made.Membership(0, 1, name, 0)
    assert known.members == (0,)
    assert known.global_rank(0) == 0
    # kept though the program's stores are gone
    again = bare(dist.PrefixStore("inner", dist.PrefixStore("outer/", store)))
    assert LiveGroup(again, 0, {}).hand_made == hand_made.Membership(0, 1, name, 1)


def test_what_the_program_writes_is_no_map_of_global_ranks(default_group: None) -> None:
    """As SGLang, slime and AReaL do."""
    store = tcp_store()
    prefixed = dist.PrefixStore("weights", store)
    group, _ = c10d._new_process_group_helper(
        1, 0, [], c10d.Backend("gloo"), prefixed, group_name="weights", timeout=WAIT
    )
    hand_made.note_by_hand(group)
    c10d._world.pg_group_ranks[group] = {0: 0}
    assert global_ranks(group) == ()
    known = LiveGroup(group, 0, {}).hand_made
    assert known is not None
    assert known.store == f"localhost:{store.port}/weights/weights"
    told_before = hand_made.membership(0, 1, prefixed, "weights")
    assert told_before == known._replace(ordinal=1)
    assert memberships() == [(0,)]  # of the default group alone


def test_torch_s_own_groups_have_global_ranks(default_group: None) -> None:
    made = dist.new_group([0])
    for group in (dist.group.WORLD, made):
        assert global_ranks(group) == (0,)
        assert LiveGroup(group, 0, {}).hand_made is None


@pytest.mark.parametrize("mapping", [{0: 1, 1: 0}, {0: 0, 1: 1}])
def test_a_map_that_cannot_be_true_is_none(default_group: None, mapping: dict[int, int]) -> None:
    """Of another process's rank, or of more ranks than there are."""
    group = bare(dist.HashStore())
    c10d._world.pg_group_ranks[group] = mapping
    assert global_ranks(group) == ()


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", socket.gethostname()])
def test_one_name_for_this_host(host: str) -> None:
    class Store:
        port = 29500

    Store.host = host  # type: ignore[attr-defined]
    assert hand_made.store_name(Store()) == "localhost:29500"


def test_stores_without_an_address(tmp_path: object) -> None:
    path = f"{tmp_path}/store"
    assert hand_made.store_name(dist.FileStore(path, 1)) == path
    assert hand_made.store_name(dist.HashStore()) == ""
    assert hand_made.store_name(dist.PrefixStore("a", dist.HashStore())) == "/a"
