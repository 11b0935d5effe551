"""Reads a pickle that holds data and nothing else: an own machine for the closed set of opcodes that data needs.

Torch's pickler writes protocol 2; Python's own writes any protocol when somebody loads a dump and saves it again. Whatever
would import, call or build an object does not exist here, so a pickle cannot run anything; memory is bounded by the file's
size, and of a file that ends too early what came before the end is kept. Python's ``pickle.Unpickler`` can do neither: one
index of its memo makes it take 64 GB, and a truncated file yields nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from commlens.errors import FormatError

__all__ = ["Pickled", "read_pickle"]

_CONTAINERS_MAX: Final = 4_000_000  # one takes a byte in the file and 60 in memory; a ring of 20,000 operations needs 160,000
_LONG_MAX: Final = 64  # bytes of an integer
_LINE_MAX: Final = 1 << 20  # characters of a line of protocol 0

_INT16: Final = struct.Struct("<H").unpack_from
_INT32: Final = struct.Struct("<i").unpack_from
_UINT32: Final = struct.Struct("<I").unpack_from
_UINT64: Final = struct.Struct("<Q").unpack_from
_FLOAT: Final = struct.Struct(">d").unpack_from


@dataclass(frozen=True, slots=True)
class Pickled:
    """What a pickle held."""

    value: Any
    cut: bool = False  # the end is missing; ``value`` holds what was complete before it


class _Cut(Exception):
    """The data ends inside an opcode."""


class _Refused(Exception):
    """The data says what data cannot say; the text is the rest of a sentence that begins with "It"."""


def read_pickle(data: bytes) -> Pickled:
    """The data in a pickle: dicts, lists, tuples, strings, bytes, numbers, booleans and None.

    Containers can be shared, and can hold themselves; whoever walks through them must not follow them without end.

    Raises:
        FormatError: it is no pickle, or would import or call something, or is damaged. The message is a sentence about "It".
    """
    stack: list[Any] = []
    below: list[list[Any]] = []  # the stacks under each mark
    memo: dict[int, Any] = {}
    at = containers = 0
    end = len(data)
    try:
        while True:
            op = data[at]
            if op == 0x68:  # BINGET
                stack.append(memo[data[at + 1]])
                at += 2
            elif op == 0x6A:  # LONG_BINGET
                stack.append(memo[_UINT32(data, at + 1)[0]])
                at += 5
            elif op == 0x4B:  # BININT1
                stack.append(data[at + 1])
                at += 2
            elif op == 0x8A:  # LONG1
                size = data[at + 1]
                if size > _LONG_MAX:
                    raise _Refused(f"holds an integer of {size} bytes")
                at += 2 + size
                if at > end:
                    raise _Cut
                stack.append(int.from_bytes(data[at - size : at], "little", signed=True))
            elif op == 0x4D:  # BININT2
                stack.append(_INT16(data, at + 1)[0])
                at += 3
            elif op == 0x4A:  # BININT
                stack.append(_INT32(data, at + 1)[0])
                at += 5
            elif op == 0x28:  # MARK
                below.append(stack)
                stack = []
                containers += 1
                at += 1
            elif op == 0x5D or op == 0x7D:  # EMPTY_LIST, EMPTY_DICT
                stack.append([] if op == 0x5D else {})
                containers += 1
                at += 1
            elif op == 0x65:  # APPENDS
                items, stack = stack, below.pop()
                _list(stack).extend(items)
                at += 1
            elif op == 0x75:  # SETITEMS
                items, stack = stack, below.pop()
                _set(stack[-1], items)
                at += 1
            elif op == 0x4E:  # NONE
                stack.append(None)
                at += 1
            elif op == 0x89 or op == 0x88:  # NEWFALSE, NEWTRUE
                stack.append(op == 0x88)
                at += 1
            elif op == 0x58:  # BINUNICODE
                size = _UINT32(data, at + 1)[0]
                at = at + 5 + size
                if at > end:
                    raise _Cut
                stack.append(str(data[at - size : at], "utf-8", "replace"))
            elif op == 0x71:  # BINPUT
                memo[data[at + 1]] = stack[-1]
                at += 2
            elif op == 0x72:  # LONG_BINPUT
                memo[_UINT32(data, at + 1)[0]] = stack[-1]
                at += 5
            elif op == 0x2E:  # STOP
                return Pickled(stack.pop())
            elif op == 0x95:  # FRAME: how much comes next, which nobody needs to know who has it all
                at += 9
            else:
                rare = _RARE.get(op)
                if rare is None:
                    raise _Refused(_forbidden(op))
                if op == 0x31 or op == 0x74 or op == 0x6C or op == 0x64:  # POP_MARK, TUPLE, LIST, DICT
                    items, stack = stack, below.pop()
                    stack.append(items)
                at = rare(data, at, stack, memo)
                containers += op not in _SMALL
            if containers > _CONTAINERS_MAX:
                raise _Refused(f"holds more than {_CONTAINERS_MAX} lists and dicts")
    except _Cut:
        return Pickled(_salvage(stack, below), cut=True)
    except _Refused as refusal:
        raise FormatError(f"It {refusal}, which no dump does.") from None
    except (IndexError, struct.error) as error:
        if at >= end or at + 1 + _OPERAND.get(data[at], 0) > end:
            return Pickled(_salvage(stack, below), cut=True)
        raise FormatError(f"It is damaged: its instructions do not fit together at byte {at}.") from error
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise FormatError(f"It is damaged at byte {at}: {_reason(error)}.") from error


def _list(stack: list[Any]) -> list[Any]:
    if type(stack[-1]) is not list:
        raise TypeError("items for a list that is none")
    return stack[-1]


_KEYS: Final = (str, int, bytes, bool, float, type(None))


def _set(target: Any, items: list[Any]) -> None:
    if type(target) is not dict or len(items) % 2:
        raise TypeError("items for a dict that is none, or an odd number of them")
    for at in range(0, len(items), 2):
        if type(items[at]) in _KEYS:  # the hash of a tuple in a tuple in a tuple is a way to keep a machine busy
            target[items[at]] = items[at + 1]


def _reason(error: Exception) -> str:
    return str(error).rstrip(".") or type(error).__name__


def _forbidden(op: int) -> str:
    import pickletools

    name = next((one.name for one in pickletools.opcodes if ord(one.code) == op), None)
    if name in ("GLOBAL", "STACK_GLOBAL", "INST", "OBJ", "REDUCE", "NEWOBJ", "NEWOBJ_EX", "BUILD", "EXT1", "EXT2", "EXT4"):
        return f"asks to import or call something (the pickle instruction {name})"
    return f"holds the pickle instruction {name}" if name else f"holds a byte that is no pickle instruction ({op:#04x})"


def _salvage(stack: list[Any], below: list[list[Any]]) -> Any:
    """What was complete before the end: every open container gets what it would have got; an unfinished item of a list is dropped."""
    unfinished: Any = None
    while below:
        items, stack = stack, below.pop()
        target = stack[-1] if stack else None
        if type(target) is list:
            target.extend(items[:-1] if items and items[-1] is unfinished else items)
            unfinished = target
        elif type(target) is dict:
            _set(target, items[: len(items) // 2 * 2])
            unfinished = target
    while len(stack) > 1:  # SETITEM and APPEND need no mark
        value = stack.pop()
        if type(stack[-1]) is list and value is not unfinished:
            stack[-1].append(value)
        elif len(stack) > 1 and type(stack[-2]) is dict and type(stack[-1]) in _KEYS:
            unfinished = stack[-2]
            unfinished[stack.pop()] = value
    return stack[0] if stack else None


# The rarer instructions: each takes the data, its place, the stack and the memo, and returns the place after it.
_Rare = Callable[[bytes, int, list[Any], dict[int, Any]], int]


def _sized(read: Callable[..., tuple[int]], width: int, make: Callable[[bytes], Any]) -> _Rare:
    def run(data: bytes, at: int, stack: list[Any], memo: dict[int, Any]) -> int:
        begin = at + 1 + width
        size = read(data, at + 1)[0]
        if begin + size > len(data):
            raise _Cut
        stack.append(make(data[begin : begin + size]))
        return begin + size

    return run


def _line(make: Callable[[bytes], Any]) -> _Rare:
    def run(data: bytes, at: int, stack: list[Any], memo: dict[int, Any]) -> int:
        found = data.find(b"\n", at + 1, at + 1 + _LINE_MAX)
        if found < 0:
            if len(data) > at + 1 + _LINE_MAX:
                raise _Refused(f"holds a line of more than {_LINE_MAX} characters")
            raise _Cut
        stack.append(make(data[at + 1 : found]))
        return found + 1

    return run


def _made(change: Callable[[list[Any]], Any]) -> _Rare:
    def run(data: bytes, at: int, stack: list[Any], memo: dict[int, Any]) -> int:
        change(stack)
        return at + 1

    return run


def _text(data: bytes) -> str:
    return str(data, "utf-8", "replace")


def _long(data: bytes) -> int:
    if len(data) > _LONG_MAX:
        raise _Refused(f"holds an integer of {len(data)} bytes")
    return int.from_bytes(data, "little", signed=True)


def _number(text: bytes) -> int | bool:
    if len(text) > 2 * _LONG_MAX:
        raise _Refused(f"holds an integer of {len(text)} digits")
    return text == b"01" if text in (b"00", b"01") else int(text.removesuffix(b"L"))


def _read_byte(data: bytes, at: int) -> tuple[int]:
    return (data[at],)


def _tuple(count: int) -> _Rare:
    def change(stack: list[Any]) -> None:
        if len(stack) < count:
            raise IndexError
        items = tuple(stack[len(stack) - count :])
        del stack[len(stack) - count :]
        stack.append(items)

    return _made(change)


def _append(stack: list[Any]) -> None:
    value = stack.pop()
    _list(stack).append(value)


def _set_item(stack: list[Any]) -> None:
    value = stack.pop()
    key = stack.pop()
    _set(stack[-1], [key, value])


def _as_dict(stack: list[Any]) -> None:
    made: dict[Any, Any] = {}
    _set(made, stack.pop())
    stack.append(made)


def _get_float(data: bytes, at: int, stack: list[Any], memo: dict[int, Any]) -> int:
    stack.append(_FLOAT(data, at + 1)[0])
    return at + 9


def _memoize(data: bytes, at: int, stack: list[Any], memo: dict[int, Any]) -> int:
    memo[len(memo)] = stack[-1]
    return at + 1


def _put(data: bytes, at: int, stack: list[Any], memo: dict[int, Any]) -> int:
    after = _line(_number)(data, at, stack, memo)
    place = stack.pop()
    memo[place] = stack[-1]
    return after


def _get(data: bytes, at: int, stack: list[Any], memo: dict[int, Any]) -> int:
    after = _line(_number)(data, at, stack, memo)
    stack.append(memo[stack.pop()])
    return after


_RARE: Final[dict[int, _Rare]] = {
    0x80: lambda data, at, stack, memo: at + 1 + len(data[at + 1 : at + 2]),  # PROTO
    0x29: _made(lambda stack: stack.append(())),  # EMPTY_TUPLE
    0x85: _tuple(1),
    0x86: _tuple(2),
    0x87: _tuple(3),
    0x61: _made(_append),  # APPEND
    0x73: _made(_set_item),  # SETITEM
    0x47: _get_float,  # BINFLOAT
    0x8C: _sized(_read_byte, 1, _text),  # SHORT_BINUNICODE
    0x8D: _sized(_UINT64, 8, _text),  # BINUNICODE8
    0x94: _memoize,
    0x43: _sized(_read_byte, 1, bytes),  # SHORT_BINBYTES
    0x42: _sized(_UINT32, 4, bytes),  # BINBYTES
    0x8E: _sized(_UINT64, 8, bytes),  # BINBYTES8
    0x8B: _sized(_UINT32, 4, _long),  # LONG4
    0x30: _made(lambda stack: stack.pop()),  # POP
    # after a mark: read_pickle has put the items since the mark on the stack as one list
    0x31: _made(lambda stack: stack.pop()),  # POP_MARK
    0x74: _made(lambda stack: stack.append(tuple(stack.pop()))),  # TUPLE
    0x6C: _made(lambda stack: None),  # LIST
    0x64: _made(_as_dict),  # DICT
    # protocol 0, in text
    0x49: _line(_number),  # INT
    0x4C: _line(_number),  # LONG
    0x46: _line(lambda text: float(text)),  # FLOAT
    0x56: _line(lambda text: text.decode("raw-unicode-escape")),  # UNICODE
    0x70: _put,
    0x67: _get,
}
_SMALL: Final = frozenset({0x80, 0x47, 0x94, 0x43, 0x8C})  # those of the rarer that take no more memory than they have bytes
_OPERAND: Final = {
    0x68: 1, 0x6A: 4, 0x4B: 1, 0x8A: 1, 0x4D: 2, 0x4A: 4, 0x58: 4, 0x71: 1, 0x72: 4, 0x80: 1, 0x47: 8, 0x8C: 1,
    0x8D: 8, 0x43: 1, 0x42: 4, 0x8E: 8, 0x8B: 4, 0x95: 8,
}  # fmt: skip
"""Bytes of operands, or of an operand's length, after an opcode: fewer are left where a file has been cut."""
