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
    # path; by rank, its content in one or two words
    at: list[tuple[str, dict[int, tuple[str, str]]]]


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
    kind = type(value).__name__
    children: list[tuple[str, Any]]
    if hasattr(value, "shape") and hasattr(value, "dtype") and not isinstance(value, type):
        device = getattr(value, "device", "")
        layout = str(getattr(value, "layout", "strided")).removeprefix("torch.")
        shape = [int(size) for size in value.shape] if shapes else [len(value.shape)]
        dtype = str(value.dtype).removeprefix("torch.")
        into.append(
            Leaf(path, _TENSOR, [shape, dtype, str(getattr(device, "type", device)), layout])
        )
        return
    if isinstance(value, Mapping):
        into.append(Leaf(path, kind, [repr(key) for key in value]))
        children = [
            (f"{path}[{json.dumps(key) if isinstance(key, str) else repr(key)}]", item)
            for key, item in value.items()
        ]
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        into.append(Leaf(path, kind, names))
        children = [(f"{path}.{name}", getattr(value, name)) for name in names]
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        into.append(Leaf(path, kind, list(value._fields)))
        children = [
            (f"{path}.{name}", item) for name, item in zip(value._fields, value, strict=False)
        ]
    elif isinstance(value, (list, tuple)):
        into.append(Leaf(path, kind, len(value)))
        children = [(f"{path}[{index}]", item) for index, item in enumerate(value)]
    else:
        plain = values and isinstance(value, (bool, int, float, complex, str, bytes))
        into.append(Leaf(path, kind, repr(value)[:200] if plain else None))
        return
    if depth < _DEEPEST:  # a container may hold itself
        for child, item in children:
            _walk(child, item, into, values, shapes, depth + 1)


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
    found: list[tuple[str, dict[int, tuple[str, str]]]] = []
    for path in paths:
        if any(path.startswith((f"{above}[", f"{above}.")) for above, _ in found):
            continue  # its container differs already
        here = {rank: each.get(path) for rank, each in by_path.items()}
        if len({_structure(leaf) for leaf in here.values()}) > 1:
            found.append(
                (path, {rank: (_structure_words(leaf), "") for rank, leaf in here.items()})
            )
    if found:
        return LeafDisagreement("structure", found)
    tensors = {
        path: {rank: each[path].detail for rank, each in by_path.items()}
        for path in paths
        if _is_tensor(by_path, path)
    }
    for at, aspect in enumerate(_ASPECTS):
        for path, details in tensors.items():
            if len({repr(_part(detail, at)) for detail in details.values()}) > 1:
                other = 1 if aspect == "shape" else 0
                words = {
                    rank: (str(_part(detail, at)), str(_part(detail, other)))
                    for rank, detail in details.items()
                }
                found.append((path, words))
        if found:
            return LeafDisagreement(aspect, found)
    for path in paths:
        values = {rank: each[path].detail for rank, each in by_path.items()}
        if len({repr(value) for value in values.values()}) > 1:
            found.append((path, {rank: (str(value), "") for rank, value in values.items()}))
    return LeafDisagreement("value", found) if found else None


def _is_tensor(by_path: Mapping[int, Mapping[str, Leaf]], path: str) -> bool:
    return all(path in each and each[path].kind == _TENSOR for each in by_path.values())


def _part(detail: Any, at: int) -> Any:
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
        return f"tensor {_part(leaf.detail, 0)} {_part(leaf.detail, 1)}"
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
