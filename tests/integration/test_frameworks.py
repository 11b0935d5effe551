"""The examples with real frameworks: a healthy run without a word, and a fault that is named with
the user's line.

Each test needs its framework: ``make frameworks`` installs all of them.
"""

from __future__ import annotations

import importlib.util
import re
import time
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


@pytest.fixture(
    params=[
        pytest.param("accelerate", marks=pytest.mark.long),  # test_accelerate.py runs it, too
        *("fabric", "lightning", "transformers", "deepspeed"),
        *("ray", "ray_actors", "torchft"),
    ]
)
def name(request: pytest.FixtureRequest) -> str:
    """Of an example whose framework is installed."""
    found: str = request.param
    package = {"fabric": "lightning", "ray_actors": "ray"}.get(found, found)
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
    until = time.monotonic() + 30
    while name == "ray_actors" and bench.processes() and time.monotonic() < until:
        time.sleep(0.5)  # Ray kills the actors once the driver has ended
    assert not bench.boxes_left and not bench.dumped


def test_an_exception_is_named(name: str, bench: Bench) -> None:
    if name == "ray_actors":
        pytest.skip("Ray keeps the exception of an actor's method to itself, and ends all actors")
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
    who = "replica 1" if name == "torchft" else "rank 1"
    assert f"VERDICT {who} raised ValueError: a bad batch at faults.py:{line} misbehave" in words, (
        run.report()
    )


def test_an_actor_that_stops_is_named(bench: Bench) -> None:
    pytest.importorskip("ray")
    script = [str(EXAMPLES / "ray_actors_train.py"), "--fault", "stop"]
    run = bench.start(*script, COMMLENS="1", COMMLENS_STALL_TIMEOUT="6")
    summary = "VERDICT rank 1 never reached all_reduce #7 of the default group [0-1]"
    prefix = re.compile(r"\x1b\[\d+m|\(Rollout pid=\d+\)")
    until = time.monotonic() + 300
    words = ""
    while summary not in words and time.monotonic() < until:
        time.sleep(1)
        words = " ".join(prefix.sub("", "\n".join([*run.out, *run.err])).split())
    assert summary in words and "is stopped" in words, run.report()


@pytest.mark.long
def test_a_loop_around_ray_train_stops_when_the_fault_comes_back(bench: Bench) -> None:
    pytest.importorskip("ray")
    run = bench.start(
        str(EXAMPLES / "ray_retry_train.py"), COMMLENS="1", COMMLENS_STALL_TIMEOUT="60"
    )
    assert run.end(timeout_s=390) != 0, run.report()
    attempts = [line for line in run.out if line.startswith("attempt ")]
    assert attempts == ["attempt 1: retry", "attempt 2: stop"], run.report()
