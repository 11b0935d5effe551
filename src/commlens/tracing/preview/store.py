"""A key-value store that behaves as if every rank had done what this one did."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


class FakeStore(dist.Store):  # type: ignore[misc]
    """The store of a fake world.

    Counters count every rank (each adds what this one adds), waits end at once, and a key that was never set is empty.
    """

    def __init__(self, world_size: int = 1) -> None:
        super().__init__()
        self._world_size = world_size
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: Any) -> None:
        """Keep a value."""
        self._values[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key: str) -> bytes:
        """The value, empty where nobody has set it."""
        return self._values.get(key, b"")

    def add(self, key: str, amount: int) -> int:
        """Count for all ranks."""
        total = int(self._values.get(key, b"0")) + amount * self._world_size
        self._values[key] = str(total).encode()
        return total

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        """Set it where it is as expected, or not there."""
        current = self._values.get(key)
        if current is None or current == (expected.encode() if isinstance(expected, str) else bytes(expected)):
            self.set(key, desired)
        return self.get(key)

    def check(self, keys: list[str]) -> bool:
        """Whatever another rank would have set is there."""
        return True

    def wait(self, keys: list[str], timeout: Any = None) -> None:
        """Nobody is waited for."""

    def delete_key(self, key: str) -> bool:
        """Forget a value."""
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        """How many values there are."""
        return len(self._values)

    def set_timeout(self, timeout: Any) -> None:
        """Nothing is waited for."""


def store_class(world_size: int, name: str) -> type[FakeStore]:
    """What stands in for ``TCPStore`` and its like: any arguments, no network."""

    def __init__(self: FakeStore, *args: Any, **kwargs: Any) -> None:
        FakeStore.__init__(self, world_size)

    return type(name, (FakeStore,), {"__init__": __init__, "__doc__": f"Stands in for {name} in a preview."})
