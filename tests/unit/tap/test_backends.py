"""How a backend behaves, by its object."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch.distributed as dist

from commlens.tap.backends import Backend, backend_of, completion_by_class, completion_of


def of(**attributes: Any) -> Backend:
    """The behaviour of a backend object with these attributes."""
    backend = SimpleNamespace(name=lambda: "nccl2", **attributes)
    return backend_of(SimpleNamespace(_get_backend=lambda _: backend), "cuda")


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ({"uid": 3}, ("status", "3", "", True)),  # NCCL until torch 2.14, and nccl-legacy
        ({"uid": 3, "supports_completion_hooks": False}, ("status", "3", "", True)),
        ({"supports_completion_hooks": True}, ("hooks", "", "nccl2", False)),  # since 2.15
        ({"supports_completion_hooks": False}, ("unknown", "", "", True)),  # ucc, plugins
        ({"uid": "a name"}, ("unknown", "", "", True)),
        ({}, ("unknown", "", "", True)),
    ],
)
def test_how_completion_is_learned(
    attributes: dict[str, Any], expected: tuple[str, str, str, bool]
) -> None:
    """A Work's result is never asked for where the answer would query the device."""
    found = of(**attributes)
    assert found.runs_ahead
    assert (found.completion, found.uid, found.recorder, found.tells_results) == expected


def test_with_blocking_wait_no_thread_of_the_backend_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert of(supports_completion_hooks=True).watches
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "1")
    found = of(supports_completion_hooks=True), of(uid=3)
    assert [(one.watches, one.tells_results) for one in found] == [(False, False)] * 2


def test_a_backend_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    group = dist.ProcessGroupGloo(store, 0, 1)
    assert completion_of(group) == completion_of(type(group)) == "call"
    found = backend_of(SimpleNamespace(_get_backend=lambda _: group), "cpu")
    assert (found.runs_ahead, found.completion) == (False, "call")


def test_of_a_class_hooks_are_assumed_if_nothing_else_tells() -> None:
    hooks = property(lambda self: False)
    legacy = type("Legacy", (), {"uid": hooks, "supports_completion_hooks": hooks})
    newer = type("Newer", (), {"supports_completion_hooks": hooks})
    assert [completion_of(kind) for kind in (legacy, newer, object)] == [
        "status",
        "hooks",
        "unknown",
    ]


def test_the_backends_of_this_torch() -> None:
    assert completion_by_class()["ProcessGroupGloo"] == "call"
