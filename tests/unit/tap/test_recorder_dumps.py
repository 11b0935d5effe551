"""The recorders of torch, whose interfaces differ between its versions."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

from commlens.tap import recorder_dumps

Content = dict[str, Any]


def dump_of(
    content: Callable[[dict[str, Any]], Content], name: str, *parameters: str
) -> Callable[..., bytes]:
    """A function as pybind11 makes it: it refuses a keyword that it does not know."""

    def dump(**given: Any) -> bytes:
        if set(given) - set(parameters):
            raise TypeError(f"incompatible function arguments: {given}")
        return json.dumps(content(given)).encode()

    dump.__doc__ = (
        f"{name}({', '.join(f'{parameter}: bool | None = None' for parameter in parameters)}) ->"
        " bytes\n\nbackend: of no use\n"
    )
    return dump


def torch_with(monkeypatch: pytest.MonkeyPatch, **functions: Callable[..., bytes]) -> None:
    import torch._C._distributed_c10d as c10d

    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        monkeypatch.delattr(c10d, name, raising=False)
    for name, function in functions.items():
        monkeypatch.setattr(c10d, name, function, raising=False)


def status(of: str) -> Content:
    return {"pg_status": {of: {"last_enqueued_collective": 2, "last_completed_collective": 1}}}


def test_the_installed_torch() -> None:
    dumps = recorder_dumps.dumps()
    assert dumps, "every torch since 2.8 has a dump function, and so has every build with NCCL"
    assert all({"includeCollectives", "onlyActive"} <= dump.keywords for dump in dumps)


def test_a_torch_of_2_6_for_cpu_has_no_recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_with(monkeypatch)
    assert recorder_dumps.dumps() == () and list(recorder_dumps.read_recorders(entries=True)) == []


def test_ncc_and_the_others_have_a_recorder_each(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = ("includeCollectives", "onlyActive")
    torch_with(
        monkeypatch,
        _dump_nccl_trace_json=dump_of(
            lambda given: status("nccl"), "_dump_nccl_trace_json", *usual
        ),
        _dump_fr_trace_json=dump_of(lambda given: status("gloo"), "_dump_fr_trace_json", *usual),
    )
    assert list(recorder_dumps.read_recorders(entries=False, backends=["x"])) == [
        status("nccl"),
        status("gloo"),
    ]


def test_a_recorder_for_each_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.15: the older function reads the same recorder as the newer one."""
    both = {
        "_dump_nccl_trace_json": dump_of(
            lambda given: status("gloo"),
            "_dump_nccl_trace_json",
            "includeCollectives",
            "onlyActive",
        ),
        "_dump_fr_trace_json": dump_of(
            lambda given: status(given.get("backend", "gloo")),
            "_dump_fr_trace_json",
            "includeCollectives",
            "onlyActive",
            "backend",
        ),
    }
    torch_with(monkeypatch, **both)
    assert list(recorder_dumps.read_recorders(entries=False)) == [status("gloo")]
    assert list(recorder_dumps.read_recorders(entries=False, backends=["nccl2", "gloo"])) == [
        status("gloo"),
        status("nccl2"),
    ]


@pytest.mark.parametrize("answer", [b"", b"[]", b"{", b"null"])
def test_an_answer_of_another_form_is_none(monkeypatch: pytest.MonkeyPatch, answer: bytes) -> None:
    def dump(**given: Any) -> bytes:
        return answer

    torch_with(monkeypatch, _dump_fr_trace_json=dump)
    assert list(recorder_dumps.read_recorders(entries=True)) == []


def test_only_what_is_asked_for_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []

    def note(given: dict[str, Any]) -> Content:
        seen.append(given)
        return {"entries": []}

    torch_with(
        monkeypatch,
        _dump_fr_trace_json=dump_of(
            note, "_dump_fr_trace_json", "includeCollectives", "onlyActive", "later"
        ),
    )
    list(recorder_dumps.read_recorders(entries=False))
    assert seen == [{"includeCollectives": False, "onlyActive": False}]


def test_a_function_written_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bool, bool]] = []

    def dump(includeCollectives: bool = True, onlyActive: bool = False) -> bytes:
        seen.append((includeCollectives, onlyActive))
        return b"{}"

    torch_with(monkeypatch, _dump_nccl_trace_json=dump)
    list(recorder_dumps.read_recorders(entries=False, only_active=True))
    assert seen == [(False, True)]
