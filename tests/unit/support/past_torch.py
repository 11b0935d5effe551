"""The stand-ins for libraries that communicate past torch's dispatcher, and adapters that are
applied to them for one test.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from commlens.tap import libraries, message_queues
from commlens.tap.libraries import Adapter

SITE = Path(__file__).parents[2] / "past_torch" / "site"


@contextlib.contextmanager
def adapted(
    adapters: Sequence[Adapter], *places: Path, late: bool = False
) -> Iterator[pytest.MonkeyPatch]:
    """Apply adapters to modules in these folders that are imported meanwhile, and forget both."""
    with pytest.MonkeyPatch.context() as patched:
        for place in places:
            patched.syspath_prepend(str(place))
        for name, empty in (("_adapters", {}), ("states", {}), ("_failed", False)):
            patched.setattr(libraries, name, empty)
        patched.setattr(message_queues, "queues", type(message_queues.queues)())
        patched.setattr(sys, "meta_path", [*sys.meta_path])
        before = {*sys.modules}
        libraries.install([*adapters], late=late)
        try:
            yield patched
        finally:
            libraries.listen(None, None)
            for name in {*sys.modules} - before:
                del sys.modules[name]
