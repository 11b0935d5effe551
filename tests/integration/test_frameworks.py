"""The examples with real frameworks: a healthy run without a word, and a fault that is named with
the user's line.

Each test needs its framework: ``make frameworks`` installs all of them.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import Bench, Program

pytest.importorskip("torch")
pytestmark = pytest.mark.timeout(400)

EXAMPLES = Path(__file__).parents[2] / "examples" / "frameworks"
LAUNCHED = {"accelerate": "launch", "transformers": "torchrun", "deepspeed": "launch"}
"""How the examples are started that do not start rank 1 themselves."""


def start(bench: Bench, name: str, fault: str) -> Program:
    """Start an example with two ranks."""
    script = [str(EXAMPLES / f"{name}_train.py"), "--fault", fault]
    how = LAUNCHED.get(name)
    on = {} if how == "launch" else {"COMMLENS": "1"}
    begin = getattr(bench, how) if how is not None else bench.start
    program: Program = begin(
        *script, **on, COMMLENS_STALL_TIMEOUT="60", TOKENIZERS_PARALLELISM="false"
    )
    return program


@pytest.fixture(params=["accelerate", "fabric", "lightning", "transformers", "ray", "deepspeed"])
def name(request: pytest.FixtureRequest) -> str:
    """Of an example whose framework is installed."""
    found: str = request.param
    package = {"fabric": "lightning"}.get(found, found)
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed; `make frameworks` installs it")
    return found


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.close()


@pytest.mark.long
def test_a_healthy_run_has_no_word(name: str, bench: Bench) -> None:
    run = start(bench, name, "none")
    assert run.end(timeout_s=350) == 0, run.report()
    text = "\n".join([*run.out, *run.err])
    assert re.search(r"loss \d", text), run.report()
    assert "commlens:" not in text and "VERDICT" not in text, run.report()
    assert not bench.boxes_left and not bench.dumped


def test_an_exception_is_named(name: str, bench: Bench) -> None:
    run = start(bench, name, "error")
    assert run.end(timeout_s=350) != 0, run.report()
    # Ray's and torchrun's
    prefix = re.compile(r"\x1b\[\d+m|\(RayTrainWorker pid=\d+\)|^\[rank\d\]:", re.MULTILINE)
    words = " ".join(prefix.sub("", "\n".join([*run.out, *run.err])).split())
    line = next(
        number
        for number, text in enumerate((EXAMPLES / "faults.py").read_text().splitlines(), 1)
        if "a bad batch" in text
    )
    assert (
        f"VERDICT rank 1 raised ValueError: a bad batch at faults.py:{line} misbehave" in words
    ), run.report()
