"""Tests of src/commlens/tap/call_arguments.py."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from commlens.tap.call_arguments import reader_of, signature_of


def of_torch(size: int, rank: int, name: str = "", *, timeout: int = 0) -> None: ...


@functools.wraps(of_torch)
def decorated(*args: Any, **kwargs: Any) -> None:
    of_torch(*args, **kwargs)


def nameless(*args: Any, **kwargs: Any) -> None: ...


@pytest.mark.parametrize("function", [of_torch, decorated])
@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((2, 1, "a"), {}), ((2, 1), {"name": "a"}), ((), {"name": "a", "rank": 1, "size": 2})],
)
def test_one_call_in_every_form(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    assert reader_of(function)(args, kwargs) == {"size": 2, "rank": 1, "name": "a"}


@pytest.mark.parametrize(
    ("function", "args", "kwargs"),
    [
        (of_torch, (2,), {}),
        (of_torch, (2, 1, "a", 4), {}),
        (of_torch, (2, 1), {"of_a_later_torch": 1}),
        (nameless, (2, 1), {}),
        (nameless, (2, 1), {"name": "a"}),
        (dict.get, (), {}),
        (dict, (2,), {}),  # it has no signature
    ],
)
def test_what_does_not_fit_is_not_read(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    assert reader_of(function)(args, kwargs) is None


def test_the_parameters_of_pybind11_are_read_from_its_text() -> None:
    class Handle:
        """Stands for the methods that pybind11 makes."""

    def original(*args: Any) -> None: ...

    text = "put(self: torch._C.Handle, dst_rank: int | str, opts: a.B = <a.B object at 0x7f>) -> x"
    original.__doc__ = f"{text}\n\nmore: words\n"
    original.__signature__ = 7  # type: ignore[attr-defined]
    signature = signature_of(original)
    assert signature is not None and [*signature.parameters] == ["self", "dst_rank", "opts"]
    assert reader_of(original)((Handle, 3), {}) == {"self": Handle, "dst_rank": 3}
    original.__doc__ = "put(*args, **kwargs)\nOverloaded function.\n\n1. put(self: torch._C.Handle)"
    assert signature_of(original) is None
