"""Replacing what belongs to others, and putting it back."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

_MISSING = object()


class Patches:
    """What was replaced, so that all of it can be put back, last first."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any]] = []
        self._aliased: dict[int, tuple[Any, Any]] = {}  # by id of a module's function: it, and what replaces it

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute; a missing one is added."""
        self._undo.append((owner, name, owner.__dict__.get(name, _MISSING)))
        setattr(owner, name, value)

    def wrap(self, owner: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
        """Replace a function or method by ``wrapper(it)``; nothing where there is none."""
        original = owner.__dict__.get(name)
        if original is None:
            return
        replacement = wrapper(original)
        self.set(owner, name, replacement)
        if isinstance(owner, types.ModuleType):
            self._aliased[id(original)] = original, replacement

    def replace_aliases(self) -> None:
        """Replace the functions that were wrapped until now under every name that any module has for them."""
        aliased, self._aliased = self._aliased, {}
        for module in list(sys.modules.values()):
            if type(module) is not types.ModuleType:
                continue
            for alias, value in list(module.__dict__.items()):
                if id(value) in aliased:
                    self.set(module, alias, aliased[id(value)][1])

    def restore(self) -> None:
        """Put everything back. What somebody else has replaced in the meantime is put back, too."""
        while self._undo:
            owner, name, value = self._undo.pop()
            if value is _MISSING:
                if name in owner.__dict__:
                    delattr(owner, name)
            else:
                setattr(owner, name, value)


def called_by_torch(package: str = "torch") -> bool:
    """Whether the function that asks was called from torch's own code. For wrappers that answer the user's code otherwise."""
    name = str(sys._getframe(2).f_globals.get("__name__", ""))
    return name == package or name.startswith(package + ".")
