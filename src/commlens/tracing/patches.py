"""Monkey patches that can be undone."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

_MISSING = object()


class Patches:
    """A list of replaced attributes, restored in reverse order."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any]] = []
        self._aliased: dict[int, tuple[Any, Any]] = {}  # by id of a module's function: the function and its replacement

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute, or add it."""
        self._undo.append((owner, name, owner.__dict__.get(name, _MISSING)))
        setattr(owner, name, value)

    def wrap(self, owner: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
        """Replace a function or method by ``wrapper(original)``, if it exists."""
        original = owner.__dict__.get(name)
        if original is None:
            return
        replacement = wrapper(original)
        self.set(owner, name, replacement)
        if isinstance(owner, types.ModuleType):
            self._aliased[id(original)] = original, replacement

    def replace_aliases(self) -> None:
        """Replace the functions wrapped so far under every name that any module has for them."""
        aliased, self._aliased = self._aliased, {}
        for module in list(sys.modules.values()):
            if type(module) is not types.ModuleType:
                continue
            for alias, value in list(module.__dict__.items()):
                if id(value) in aliased:
                    self.set(module, alias, aliased[id(value)][1])

    def restore(self) -> None:
        """Restore all originals, even where other code has replaced ours since."""
        while self._undo:
            owner, name, value = self._undo.pop()
            if value is _MISSING:
                if name in owner.__dict__:
                    delattr(owner, name)
            else:
                setattr(owner, name, value)


def called_by_torch(package: str = "torch") -> bool:
    """Check whether torch called the calling wrapper. Such wrappers answer the user's code differently."""
    name = str(sys._getframe(2).f_globals.get("__name__", ""))
    return name == package or name.startswith(package + ".")
