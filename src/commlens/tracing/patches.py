"""Monkey patches that can be undone."""

from __future__ import annotations

import functools
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

from commlens.tap.call_arguments import reader_of

_MISSING = object()
_lock = threading.Lock()


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

    def wrap_named(self, owner: Any, name: str, instead: Callable[..., Any]) -> None:
        """Make calls of a function, if it exists, call ``instead(original, arguments by name)``;
        calls that do not fit its parameters go on to the function.
        """
        if (found := owner.__dict__.get(name)) is None:
            return
        read = reader_of(found)

        def with_names(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            given = read(args, kwargs)
            return original(*args, **kwargs) if given is None else instead(original, given)

        self.wrap(owner, name, with_names)

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute that other modules may have under names of their own."""
        original = owner.__dict__[name]
        self.set(owner, name, value)
        if isinstance(owner, types.ModuleType):
            self._aliased[id(original)] = original, value

    def replace_aliases(self) -> None:
        """Replace the functions that were wrapped or replaced so far under all their other names,
        in all modules.
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


class SharedPatch:
    """A function that is replaced while it has users.

    Where other code has wrapped ours since, it stays in place, and passes calls through.

    Args:
        owner: of the function.
        name: of the function.
        make: takes the original and returns what replaces it.
        changed: called with the former and the new function.
    """

    def __init__(
        self,
        owner: Any,
        name: str,
        make: Callable[[Any], Any],
        changed: Callable[[Any, Any], None] = lambda before, after: None,
    ) -> None:
        self.users: tuple[Any, ...] = ()
        self._owner, self._name, self._make, self._changed = owner, name, make, changed
        self._wrapper: Any = None
        self._original: Any = None

    def add(self, user: Any) -> None:
        """Add a user; the first one installs the patch."""
        with _lock:
            self.users = (*self.users, user)
            original = self._owner.__dict__.get(self._name)
            if self._wrapper is None and original is not None:
                self._original = original
                self._wrapper = functools.wraps(original)(self._make(original))
                self._changed(original, self._wrapper)
                setattr(self._owner, self._name, self._wrapper)

    def remove(self, user: Any) -> None:
        """Remove a user; the last one takes the patch away."""
        with _lock:
            self.users = tuple(other for other in self.users if other != user)
            is_ours = self._owner.__dict__.get(self._name) is self._wrapper
            if not self.users and self._wrapper is not None and is_ours:
                setattr(self._owner, self._name, self._original)
                self._changed(self._wrapper, self._original)
                self._wrapper = None


def called_by_torch(package: str = "torch") -> bool:
    """Check whether torch called a wrapped function, from the code that runs instead of it. The
    user's code gets other answers.
    """
    name = str(sys._getframe(3).f_globals.get("__name__", ""))
    return name == package or name.startswith(package + ".")
