"""A key-value store that behaves as if every rank had made the same calls."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

CHOSEN_PORT = 60999
"""The port that a ``TCPStore`` says the system has chosen: the last one from which Linux chooses,
far from those that programs name.
"""


class FakeStore(dist.Store):  # type: ignore[misc]
    """The store of a fake world.

    Each addition counts once per rank, waits return at once, and a missing key is empty.
    """

    def __init__(self, world_size: int = 1, host: str = "", port: int = 0) -> None:
        super().__init__()
        self.host = host
        self.port = port
        self._world_size = world_size
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: Any) -> None:
        """Set a value."""
        self._values[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key: str) -> bytes:
        """Return the value, empty if it was never set."""
        return self._values.get(key, b"")

    def add(self, key: str, amount: int) -> int:
        """Add the amount once per rank."""
        total = int(self._values.get(key, b"0")) + amount * self._world_size
        self._values[key] = str(total).encode()
        return total

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        """Set the value if the current one is missing or as expected."""
        current = self._values.get(key)
        if current is None or current == (
            expected.encode() if isinstance(expected, str) else bytes(expected)
        ):
            self.set(key, desired)
        return self.get(key)

    def check(self, keys: list[str]) -> bool:
        """Report every key as set, as if another rank had set it."""
        return True

    def wait(self, keys: list[str], timeout: Any = None) -> None:
        """Return at once."""

    def delete_key(self, key: str) -> bool:
        """Delete a value."""
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        """Return the number of values."""
        return len(self._values)

    def set_timeout(self, timeout: Any) -> None:
        """Ignore the timeout: nothing waits."""


def store_class(world_size: int, name: str) -> type[FakeStore]:
    """Return a stand-in for ``TCPStore`` and other stores: it takes any arguments and uses no
    network. Only a ``TCPStore`` has a host and a port.
    """

    def without_address(self: FakeStore, *args: Any, **kwargs: Any) -> None:
        FakeStore.__init__(self, world_size)

    def with_address(
        self: FakeStore, host_name: str, port: int = 0, *args: Any, **kwargs: Any
    ) -> None:
        FakeStore.__init__(self, world_size, host_name, port or CHOSEN_PORT)

    return type(
        name,
        (FakeStore,),
        {
            "__init__": with_address if name == "TCPStore" else without_address,
            "__doc__": f"Stands in for {name} in a preview.",
        },
    )
