"""Attributes that are replaced and put back."""

from __future__ import annotations

import sys
import types

from commlens.tracing.patches import Patches


class Owner:
    value = 1

    def method(self, number: int) -> int:
        return number + self.value

    @staticmethod
    def static(number: int) -> int:
        return number


def test_all_is_put_back_in_reverse_order() -> None:
    patches = Patches()
    patches.set(Owner, "value", 2)
    patches.set(Owner, "value", 3)
    patches.set(Owner, "added", 4)
    assert (Owner.value, Owner.added) == (3, 4)  # type: ignore[attr-defined]
    patches.restore()
    assert Owner.value == 1 and not hasattr(Owner, "added")


def test_calls_go_through_the_wrapper() -> None:
    patches = Patches()
    patches.wrap(Owner, "method", lambda original, *args: original(*args) * 10)
    patches.wrap(Owner, "static", lambda original, *args: original(*args) * 10)
    patches.wrap(Owner, "not_there", lambda original, *args: None)
    assert (Owner().method(2), Owner.static(2)) == (30, 20)
    assert Owner.method.__name__ == "method"
    patches.restore()
    assert (Owner().method(2), Owner.static(2)) == (3, 2)


def test_names_that_other_modules_have_for_it() -> None:
    module, importer = types.ModuleType("of_it"), types.ModuleType("importer")
    module.function = original = lambda: "original"  # type: ignore[attr-defined]
    importer.alias = module.function  # type: ignore[attr-defined]
    sys.modules["importer"] = importer
    patches = Patches()
    try:
        patches.replace(module, "function", lambda: "other")
        patches.replace_aliases()
        assert importer.alias() == "other"  # type: ignore[attr-defined]
        patches.restore()
        assert importer.alias is module.function is original  # type: ignore[attr-defined]
    finally:
        del sys.modules["importer"]
