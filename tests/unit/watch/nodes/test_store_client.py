"""The client of the job's store, against torch's real TCPStore with both of its servers."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest

from commlens.watch.nodes.calls import Poke
from commlens.watch.nodes.store_client import StoreClient

dist = pytest.importorskip("torch.distributed")


@pytest.fixture(params=[True, False], ids=["libuv", "threads"])
def store(request: pytest.FixtureRequest) -> Iterator:
    yield dist.TCPStore(
        "127.0.0.1",
        0,
        is_master=True,
        wait_for_workers=False,
        use_libuv=request.param,
        timeout=timedelta(seconds=10),
    )


@pytest.fixture
def client(store) -> Iterator[StoreClient]:
    client = StoreClient("127.0.0.1", store.port)
    yield client
    client.close()


def test_values_pass_between_torch_and_the_client(store, client: StoreClient):
    client.set("commlens/a", b"\0one\xff")
    assert client.get(["commlens/a"]) == [b"\0one\xff"]
    assert store.get("commlens/a") == b"\0one\xff"
    store.set("commlens/b", "two")
    assert client.get(["commlens/b", "commlens/a"]) == [b"two", b"\0one\xff"]


def test_a_value_is_stored_at_the_latest_when_the_connection_is_closed(store):
    with_a_request, at_the_end = (
        StoreClient("127.0.0.1", store.port),
        StoreClient("127.0.0.1", store.port),
    )
    with_a_request.set("commlens/a", b"one")
    assert with_a_request.get([]) == []
    assert store.get("commlens/a") == b"one"
    at_the_end.set("commlens/b", b"two")
    at_the_end.close()
    assert store.get("commlens/b") == b"two"
    with_a_request.close()


def test_several_exchanges_in_one_store_have_keys_of_their_own(store, client: StoreClient):
    within = StoreClient("127.0.0.1", store.port, within="worlds/")
    assert [within.add("n", 2), client.add("worlds/n", 1), client.add("n", 1)] == [2, 3, 1]
    within.close()


def test_counters(store, client: StoreClient):
    assert client.add("commlens/n", 1) == 1
    assert store.add("commlens/n", 1) == 2
    assert client.add("commlens/n", 0) == 2


def test_a_missing_key_is_no_wait(store, client: StoreClient):
    client.set("commlens/now", b"")
    assert client.existing_keys(["commlens/never", "commlens/now"]) == ["commlens/now"]


def test_a_pause_ends_when_its_key_is_set(store, client: StoreClient):
    poke = Poke()
    began = time.monotonic()
    assert not client.wait_for("commlens/wake", 0.2, poke.fileno())
    assert time.monotonic() - began > 0.15
    poke.set()
    assert not client.wait_for("commlens/wake", 30, poke.fileno()), "this process ended it"
    poke.clear()
    timer = threading.Timer(0.2, store.set, ("commlens/wake", ""))
    timer.start()
    assert client.wait_for("commlens/wake", 30, poke.fileno())
    timer.join()
    store.set("commlens/wake", "")
    assert client.wait_for("commlens/wake", 30, poke.fileno()), "it was set before"
    assert client.existing_keys(["commlens/wake"]) == []
    client.set("commlens/a", b"one")
    assert client.get(["commlens/a"]) == [b"one"]
    assert time.monotonic() - began < 20


def test_many_keys_and_large_values(client: StoreClient):
    keys = [f"commlens/{number}" for number in range(300)]
    for number, key in enumerate(keys):
        client.set(key, bytes([number % 256]) * (1 + number * 100))
    assert [len(value) for value in client.get(keys)] == [1 + number * 100 for number in range(300)]
    client.set("commlens/large", bytes(3_000_000))
    assert client.get(["commlens/large"]) == [bytes(3_000_000)]


def test_a_store_that_does_not_answer_is_an_error_in_time():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = StoreClient("127.0.0.1", silent.getsockname()[1], timeout_s=0.3)
        began = time.monotonic()
        with pytest.raises(OSError, match="timed out"):
            client.add("commlens/n", 1)
        assert time.monotonic() - began < 5
        client.close()


def test_something_else_than_a_store_is_an_error():
    def answer():
        with server.accept()[0] as connection:
            connection.recv(100)
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answer)
        thread.start()
        client = StoreClient("127.0.0.1", server.getsockname()[1], timeout_s=2)
        with pytest.raises(OSError):
            client.get(["commlens/a"])
        client.close()
        thread.join(5)
