"""The arguments of a function as data that ranks can compare: nested containers, tensors and other
values.

No torch: any object with a shape and a dtype counts as a tensor.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

PLAIN_SIZE: Final = 8 * 1024  # bytes of JSON; more is compressed
_DEEPEST: Final = 32
_TENSOR: Final = "tensor"
_ASPECTS: Final = ("shape", "dtype", "device", "layout")
# a path in the arguments; by rank, its content in one or two words
_Place = tuple[str, dict[int, tuple[str, str]]]


class Leaf(msgspec.Struct, frozen=True, array_like=True):
    """A container, a tensor or another value, and its path in the arguments."""

    path: str  # inputs["tokens"][0]
    kind: str  # "tensor", or the name of the type
    # a tensor's aspects, a container's keys or length, a value if values are compared
    detail: list[Any] | int | str | None = None


class LeafDisagreement(msgspec.Struct, frozen=True):
    """Arguments that differ between ranks."""

    # "structure", "shape", "dtype", "device", "layout", "value"; "argument" if there are too many
    # leaves to compare
    aspect: str
    at: list[_Place]


def describe(
    arguments: Mapping[str, Any], compare_value: Callable[[str], bool], *, shapes: bool = True
) -> list[Leaf]:
    """Return all leaves of the arguments, containers before their elements.

    Args:
        arguments: the arguments by name.
        compare_value: returns whether plain values (numbers, strings, booleans) in the argument of
            this name must be equal.
        shapes: whether tensors must have equal shapes; otherwise only equal numbers of dimensions.
    """
    leaves: list[Leaf] = []
    for name, value in arguments.items():
        _walk(name, value, leaves, compare_value(name), shapes, 0)
    return leaves


def _walk(path: str, value: Any, into: list[Leaf], values: bool, shapes: bool, depth: int) -> None:
    leaf, children = _open(path, value, values, shapes)
    into.append(leaf)
    if depth < _DEEPEST:  # a container may hold itself
        for child, item in children:
            _walk(child, item, into, values, shapes, depth + 1)


def _open(path: str, value: Any, values: bool, shapes: bool) -> tuple[Leaf, list[tuple[str, Any]]]:
    """Return a value's leaf, and the paths and values of a container's elements."""
    kind = type(value).__name__
    if hasattr(value, "shape") and hasattr(value, "dtype") and not isinstance(value, type):
        return Leaf(path, _TENSOR, _aspects(value, shapes)), []
    if isinstance(value, Mapping):
        return Leaf(path, kind, [repr(key) for key in value]), [
            (f"{path}[{json.dumps(key) if isinstance(key, str) else repr(key)}]", item)
            for key, item in value.items()
        ]
    names = _field_names(value)
    if names is not None:
        return Leaf(path, kind, names), [(f"{path}.{name}", getattr(value, name)) for name in names]
    if isinstance(value, (list, tuple)):
        return Leaf(path, kind, len(value)), [
            (f"{path}[{index}]", item) for index, item in enumerate(value)
        ]
    plain = values and isinstance(value, (bool, int, float, complex, str, bytes))
    return Leaf(path, kind, repr(value)[:200] if plain else None), []


def _aspects(tensor: Any, shapes: bool) -> list[Any]:
    device = getattr(tensor, "device", "")
    return [
        [int(size) for size in tensor.shape] if shapes else [len(tensor.shape)],
        str(tensor.dtype).removeprefix("torch."),
        str(getattr(device, "type", device)),
        str(getattr(tensor, "layout", "strided")).removeprefix("torch."),
    ]


def _field_names(value: Any) -> list[str] | None:
    """Return the fields of a dataclass or a named tuple; None of anything else."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
    return list(value._fields) if isinstance(value, tuple) and hasattr(value, "_fields") else None


def pack(leaves: Sequence[Leaf]) -> Any:
    """Return the leaves as JSON-compatible content of a blob, compressed if there are many."""
    plain = msgspec.to_builtins(leaves)
    text = json.dumps(plain).encode()
    return plain if len(text) <= PLAIN_SIZE else base64.b85encode(zlib.compress(text)).decode()


def unpack(content: Any) -> list[Leaf] | None:
    """Return the leaves of a blob; None if it has none that can be read."""
    try:
        plain = (
            json.loads(zlib.decompress(base64.b85decode(content)))
            if isinstance(content, str)
            else content
        )
        return msgspec.convert(plain, list[Leaf])
    except (ValueError, zlib.error, msgspec.ValidationError):
        return None


def compare_leaves(leaves: Mapping[int, Sequence[Leaf] | None]) -> LeafDisagreement | None:
    """Compare the ranks' arguments: their structure first, since nothing else can be compared
    without it.
    """
    if any(each is None for each in leaves.values()):
        return LeafDisagreement("argument", [])
    by_path = {rank: {leaf.path: leaf for leaf in each or ()} for rank, each in leaves.items()}
    paths = list(dict.fromkeys(path for each in by_path.values() for path in each))
    if found := _other_structures(by_path, paths):
        return LeafDisagreement("structure", found)
    return _compare_details(by_path, paths)


def _compare_details(
    by_path: Mapping[int, Mapping[str, Leaf]], paths: Sequence[str]
) -> LeafDisagreement | None:
    """Compare tensors aspect by aspect, then all values, in structures that are equal."""
    details = {path: {rank: each[path].detail for rank, each in by_path.items()} for path in paths}
    tensors = {
        path: details[path]
        for path in paths
        if all(each[path].kind == _TENSOR for each in by_path.values())
    }
    for at, aspect in enumerate(_ASPECTS):
        other = 1 if aspect == "shape" else 0
        if found := _differing(tensors, lambda detail: (_item(detail, at), _item(detail, other))):  # noqa: B023
            return LeafDisagreement(aspect, found)
    found = _differing(details, lambda detail: (detail, ""))
    return LeafDisagreement("value", found) if found else None


def _other_structures(
    by_path: Mapping[int, Mapping[str, Leaf]], paths: Sequence[str]
) -> list[_Place]:
    found: list[_Place] = []
    for path in paths:
        if any(path.startswith((f"{above}[", f"{above}.")) for above, _ in found):
            continue  # its container differs already
        here = {rank: each.get(path) for rank, each in by_path.items()}
        if len({_structure(leaf) for leaf in here.values()}) > 1:
            found.append(
                (path, {rank: (_structure_words(leaf), "") for rank, leaf in here.items()})
            )
    return found


def _differing(
    details: Mapping[str, Mapping[int, Any]], cells: Callable[[Any], tuple[Any, Any]]
) -> list[_Place]:
    """Return the paths at which the first cells of ranks differ, and both cells of each rank."""
    found: list[_Place] = []
    for path, by_rank in details.items():
        shown = {rank: cells(detail) for rank, detail in by_rank.items()}
        if len({repr(first) for first, _ in shown.values()}) > 1:
            words = {rank: (str(first), str(second)) for rank, (first, second) in shown.items()}
            found.append((path, words))
    return found


def _item(detail: Any, at: int) -> Any:
    return detail[at] if isinstance(detail, list) and at < len(detail) else None


def _structure(leaf: Leaf | None) -> str:
    if leaf is None:
        return ""
    inside = None if leaf.kind == _TENSOR or isinstance(leaf.detail, str) else leaf.detail
    return f"{leaf.kind} {inside}"


def _structure_words(leaf: Leaf | None) -> str:
    if leaf is None:
        return "nothing"
    if leaf.kind == _TENSOR:
        return f"tensor {_item(leaf.detail, 0)} {_item(leaf.detail, 1)}"
    if leaf.kind == "NoneType":
        return "None"
    if isinstance(leaf.detail, int):
        return f"{leaf.kind} of {leaf.detail}"
    if isinstance(leaf.detail, list):
        shown = ", ".join(str(key) for key in leaf.detail[:8]) + (
            ", ..." if len(leaf.detail) > 8 else ""
        )
        return f"{leaf.kind} with {shown}" if leaf.detail else f"empty {leaf.kind}"
    return leaf.kind
