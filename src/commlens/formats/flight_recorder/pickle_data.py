"""Read a pickle that holds only data: an interpreter of the pickle instructions that plain data
needs, and of no others.

A pickle is a program for a machine with a stack and a memo. ``{"pg": [1, 2]}`` is, in protocol 2::

    PROTO 2                  header
    EMPTY_DICT BINPUT 0      push {}, and keep it in the memo as 0
    BINUNICODE "pg" BINPUT 1 push "pg"
    EMPTY_LIST BINPUT 2      push []
    MARK                     open a stack on top: stacks are [{}, "pg", []] and []
    BININT1 1 BININT1 2      push 1 and 2
    APPENDS                  close that stack: its items go into the list below
    SETITEM                  put the value, on top, and the key, below it, into the dict below
    STOP                     return what is on the stack

Torch's pickler writes protocol 2; Python's writes 4 or 5 if a script loads a dump and saves it
again. The instructions of older protocols, and those that import, call or build objects, do not
exist here, so a pickle cannot run code. Memory is bounded by the file's size, and a truncated file
yields everything before the cut: of the example, cut before APPENDS, ``{"pg": [1, 2]}``. Python's
``pickle.Unpickler`` can do neither: one memo index makes it allocate 64 GB, and a truncated file
yields nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, Final

from commlens.errors import FormatError

# A list or dict takes 1 byte in the file and 60 in memory: so not only the file's size is bounded.
# The dump of a ring buffer of 20,000 operations has 160,000.
_CONTAINERS_MAX: Final = 4_000_000
_LONG_MAX: Final = 64  # bytes of an integer
# Types of the keys of a dict; items with other keys are left out. No tuples: to hash tuples that
# are nested deeply, and share their parts, can take forever.
_KEYS: Final = (str, int, bytes, bool, float, type(None))

_UINT16: Final = struct.Struct("<H").unpack_from
_INT32: Final = struct.Struct("<i").unpack_from
_UINT32: Final = struct.Struct("<I").unpack_from
_UINT64: Final = struct.Struct("<Q").unpack_from
_FLOAT: Final = struct.Struct(">d").unpack_from


class _Truncated(Exception):
    """The data ends inside an opcode."""


class _Refused(Exception):
    """The pickle holds something that plain data never needs. The text completes a sentence that
    begins with "It".
    """


class _Stopped(Exception):
    """An instruction failed, ``at`` this position; why is in ``__cause__``."""

    def __init__(self, at: int) -> None:
        super().__init__(at)
        self.at = at


def read_pickle(data: bytes) -> tuple[Any, bool]:
    """Return the data in a pickle: dicts, lists, tuples, strings, bytes, numbers, booleans and
    None; and whether it is truncated: the data is what was complete before the cut.

    Containers may be shared or contain themselves, so callers must not follow them without a limit.

    Raises:
        FormatError: the data is not a pickle, is damaged, or would import or call something. The
            message is a sentence that begins with "It".
    """
    stacks: list[list[Any]] = [[]]
    try:
        return _execute(data, stacks), False
    except _Stopped as stopped:
        at, cause = stopped.at, stopped.__cause__
        if isinstance(cause, _Refused):
            raise FormatError(f"It {cause}, which no dump that torch writes does.") from None
        # An IndexError with all its operands there comes from an empty stack.
        is_past_end = at >= len(data) or at + 1 + _OPERAND.get(data[at], 0) > len(data)
        has_wrong_index = isinstance(cause, (IndexError, struct.error))
        if isinstance(cause, _Truncated) or (has_wrong_index and is_past_end):
            return _salvage(stacks), True
        if has_wrong_index:
            raise FormatError(
                f"It is damaged: its instructions do not fit together at byte {at}."
            ) from cause
        reason = str(cause).rstrip(".") or type(cause).__name__
        raise FormatError(f"It is damaged at byte {at}: {reason}.") from cause


def _execute(data: bytes, stacks: list[list[Any]]) -> Any:
    """Run the instructions. The frequent ones are inline, because a dump has millions; the others
    are in ``_AFTER_MARK`` and ``_OPCODES``.

    Args:
        data: the pickle.
        stacks: one empty stack; each open MARK is another one on top. After an error they hold the
            data up to there, for :func:`_salvage`.

    Raises:
        _Stopped: the data is truncated, damaged or refused.
    """
    memo: dict[int, Any] = {}
    stack = stacks[-1]
    at = containers = 0
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
                if at + 2 + size > len(data) and size <= _LONG_MAX:
                    raise _Truncated
                stack.append(_long(data[at + 2 : at + 2 + size], size))
                at += 2 + size
            elif op == 0x4D:  # BININT2
                stack.append(_UINT16(data, at + 1)[0])
                at += 3
            elif op == 0x4A:  # BININT
                stack.append(_INT32(data, at + 1)[0])
                at += 5
            elif op == 0x28:  # MARK
                stack = []
                stacks.append(stack)
                containers += 1
                at += 1
            elif op == 0x5D or op == 0x7D:  # EMPTY_LIST, EMPTY_DICT
                stack.append([] if op == 0x5D else {})
                containers += 1
                at += 1
            elif op == 0x65:  # APPENDS
                items = stacks.pop()
                stack = stacks[-1]
                _as_list(stack[-1]).extend(items)
                at += 1
            elif op in _AFTER_MARK:
                items = stacks.pop()
                stack = stacks[-1]
                _AFTER_MARK[op](stack, items)
                containers += op not in _NOT_COUNTED
                at += 1
            elif op == 0x4E:  # NONE
                stack.append(None)
                at += 1
            elif op == 0x89 or op == 0x88:  # NEWFALSE, NEWTRUE
                stack.append(op == 0x88)
                at += 1
            elif op == 0x2E:  # STOP
                return stack.pop()
            else:
                run = _OPCODES.get(op)
                if run is None:
                    raise _Refused(_refusal(op))
                at = run(data, at, stack, memo)
                containers += op not in _NOT_COUNTED
            if containers > _CONTAINERS_MAX:
                raise _Refused(f"holds more than {_CONTAINERS_MAX} lists and dicts")
    except (
        _Truncated,
        _Refused,
        IndexError,
        struct.error,
        ValueError,
        TypeError,
        KeyError,
        OverflowError,
    ) as error:
        raise _Stopped(at) from error


def _as_list(value: Any) -> list[Any]:
    """Return a list as it is; a damaged pickle may have something else there."""
    if type(value) is not list:
        raise TypeError("items are added to something that is not a list")
    return value


def _set_items(target: Any, items: list[Any]) -> None:
    """Put keys and values, which alternate, into a dict."""
    if type(target) is not dict or len(items) % 2:
        raise TypeError("items are added to something that is not a dict, or their number is odd")
    for at in range(0, len(items), 2):
        if type(items[at]) in _KEYS:
            target[items[at]] = items[at + 1]


def _refusal(op: int) -> str:
    """Return the reason why an opcode is refused, for a sentence that begins with "It"."""
    import pickletools

    name = next((one.name for one in pickletools.opcodes if ord(one.code) == op), None)
    if name in (
        "GLOBAL",
        "STACK_GLOBAL",
        "INST",
        "OBJ",
        "REDUCE",
        "NEWOBJ",
        "NEWOBJ_EX",
        "BUILD",
        "EXT1",
        "EXT2",
        "EXT4",
    ):
        return f"asks to import or call something (the pickle instruction {name})"
    return (
        f"holds the pickle instruction {name}"
        if name
        else f"holds a byte that is no pickle instruction ({op:#04x})"
    )


def _salvage(stacks: list[list[Any]]) -> Any:
    """Return the data before a cut: put what lies above each open MARK into the container below it,
    from the innermost one outwards.

    A list gets only finished items: of a dump's list of entries, the entry in which the file ends
    is left out. A dict gets an unfinished value, so that the list of entries itself is kept.
    """
    unfinished: Any = None  # the container that was filled last
    stack = stacks.pop()
    while stacks:
        items, stack = stack, stacks.pop()
        container = stack[-1] if stack else None
        if type(container) is list:
            container.extend(items[:-1] if items and items[-1] is unfinished else items)
            unfinished = container
        elif type(container) is dict:
            _set_items(container, items[: len(items) // 2 * 2])
            unfinished = container
    while len(stack) > 1:  # items that are added one by one, by APPEND and SETITEM, have no mark
        value = stack.pop()
        if type(stack[-1]) is list and value is not unfinished:
            stack[-1].append(value)
        elif len(stack) > 1 and type(stack[-2]) is dict and type(stack[-1]) in _KEYS:
            unfinished = stack[-2]
            unfinished[stack.pop()] = value
    return stack[0] if stack else None


_AFTER_MARK: Final[dict[int, Callable[[list[Any], list[Any]], None]]] = {
    0x75: lambda stack, items: _set_items(stack[-1], items),  # SETITEMS
    0x31: lambda stack, items: None,  # POP_MARK
    0x74: lambda stack, items: stack.append(tuple(items)),  # TUPLE
}
"""Instructions besides APPENDS that take the items above the last mark, by their opcode."""

# --- the other instructions: each takes the data, the position, the stack and the memo, and returns
# the position after it

_Opcode = Callable[[bytes, int, list[Any], dict[int, Any]], int]


def _sized(read: Callable[..., tuple[int]], width: int, make: Callable[[bytes], Any]) -> _Opcode:
    """Return an instruction with a length, of ``width`` bytes, and content of that length."""

    def run(data: bytes, at: int, stack: list[Any], memo: dict[int, Any]) -> int:
        begin = at + 1 + width
        end = begin + read(data, at + 1)[0]
        if end > len(data):
            raise _Truncated
        stack.append(make(data[begin:end]))
        return end

    return run


def _on_stack(change: Callable[[list[Any]], Any]) -> _Opcode:
    """Return an instruction without operands, that changes the stack."""

    def run(data: bytes, at: int, stack: list[Any], memo: dict[int, Any]) -> int:
        change(stack)
        return at + 1

    return run


def _text(data: bytes) -> str:
    return str(data, "utf-8", "replace")


def _long(data: bytes, size: int | None = None) -> int:
    size = len(data) if size is None else size
    if size > _LONG_MAX:
        raise _Refused(f"holds an integer of {size} bytes")
    return int.from_bytes(data, "little", signed=True)


def _read_byte(data: bytes, at: int) -> tuple[int]:
    return (data[at],)


def _tuple(count: int) -> _Opcode:
    def change(stack: list[Any]) -> None:
        if len(stack) < count:
            raise IndexError
        items = tuple(stack[len(stack) - count :])
        del stack[len(stack) - count :]
        stack.append(items)

    return _on_stack(change)


def _binary_float(data: bytes, at: int, stack: list[Any], memo: dict[int, Any]) -> int:
    stack.append(_FLOAT(data, at + 1)[0])
    return at + 9


def _put_at(read: Callable[..., tuple[int]], width: int) -> _Opcode:
    """Return an instruction that puts the top of the stack into the memo, under an index of
    ``width`` bytes.
    """

    def run(data: bytes, at: int, stack: list[Any], memo: dict[int, Any]) -> int:
        memo[read(data, at + 1)[0]] = stack[-1]
        return at + 1 + width

    return run


def _memoize(data: bytes, at: int, stack: list[Any], memo: dict[int, Any]) -> int:
    memo[len(memo)] = stack[-1]
    return at + 1


_OPCODES: Final[dict[int, _Opcode]] = {
    0x80: lambda data, at, stack, memo: at + 1 + len(data[at + 1 : at + 2]),  # PROTO
    # FRAME: the length of the next part, not needed with the whole data in memory
    0x95: lambda data, at, stack, memo: at + 9,
    0x58: _sized(_UINT32, 4, _text),  # BINUNICODE
    0x71: _put_at(_read_byte, 1),  # BINPUT
    0x72: _put_at(_UINT32, 4),  # LONG_BINPUT
    0x29: _on_stack(lambda stack: stack.append(())),  # EMPTY_TUPLE
    0x85: _tuple(1),
    0x86: _tuple(2),
    0x87: _tuple(3),
    0x61: _on_stack(lambda stack: _as_list(stack[-2]).append(stack.pop())),  # APPEND
    0x73: _on_stack(lambda stack: _set_items(stack[-3], [stack.pop(-2), stack.pop()])),  # SETITEM
    0x47: _binary_float,
    0x8C: _sized(_read_byte, 1, _text),  # SHORT_BINUNICODE
    0x8D: _sized(_UINT64, 8, _text),  # BINUNICODE8
    0x94: _memoize,
    0x43: _sized(_read_byte, 1, bytes),  # SHORT_BINBYTES
    0x42: _sized(_UINT32, 4, bytes),  # BINBYTES
    0x8E: _sized(_UINT64, 8, bytes),  # BINBYTES8
    0x8B: _sized(_UINT32, 4, _long),  # LONG4
    0x30: _on_stack(lambda stack: stack.pop()),  # POP
}
# All instructions of the two tables count as containers, but those that are frequent and make
# nothing larger than their bytes in the file.
_NOT_COUNTED: Final = frozenset({0x75, 0x80, 0x95, 0x58, 0x71, 0x72, 0x47, 0x94, 0x43, 0x8C})
_OPERAND: Final = {
    0x68: 1,
    0x6A: 4,
    0x4B: 1,
    0x8A: 1,
    0x4D: 2,
    0x4A: 4,
    0x58: 4,
    0x71: 1,
    0x72: 4,
    0x80: 1,
    0x47: 8,
    0x8C: 1,
    0x8D: 8,
    0x43: 1,
    0x42: 4,
    0x8E: 8,
    0x8B: 4,
    0x95: 8,
}
"""By opcode: the fewest bytes that follow it. If fewer are left, the file is truncated."""
