"""Monkey patches that can be undone."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import Any

_MISSING = object()


class Patches:
    """A list of replaced attributes, restored in reverse order."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any]] = []
        # by id of a module's attribute: its former value and its value
        self._aliased: dict[int, tuple[Any, Any]] = {}

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute, or add it."""
        self._undo.append((owner, name, owner.__dict__.get(name, _MISSING)))
        setattr(owner, name, value)

    def wrap(self, owner: Any, name: str, instead: Callable[..., Any]) -> None:
        """Make calls of a function or method, if it exists, call ``instead(original,
        *arguments)``.
        """
        found = owner.__dict__.get(name)
        if found is None:
            return
        original = found.__func__ if isinstance(found, staticmethod) else found

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return instead(original, *args, **kwargs)

        self.replace(
            owner, name, staticmethod(wrapper) if isinstance(found, staticmethod) else wrapper
        )

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute that other modules may have under names of their own."""
        original = owner.__dict__[name]
        self.set(owner, name, value)
        if isinstance(owner, types.ModuleType):
            self._aliased[id(original)] = original, value

    def replace_aliases(self) -> None:
        """Replace what was wrapped or replaced so far under every name that any module has for
        them.
        """
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
    """Check whether torch called a wrapped function, from the code that runs instead of it. The
    user's code gets other answers.
    """
    name = str(sys._getframe(3).f_globals.get("__name__", ""))
    return name == package or name.startswith(package + ".")
