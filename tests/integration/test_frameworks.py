"""The examples with real frameworks: a healthy run without a word, and a fault that is named with
the user's line.

Each test needs its framework: ``make frameworks`` installs all of them.
"""

from __future__ import annotations

import importlib.util
import re
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


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("accelerate", "accelerate"),
        ("fabric", "lightning"),
        ("lightning", "lightning"),
        ("transformers", "transformers"),
        ("ray", "ray"),
        ("deepspeed", "deepspeed"),
    ],
)
def test_a_healthy_run_has_no_word_and_an_exception_is_named(
    name: str, package: str, tmp_path: Path
) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed; `make frameworks` installs it")
    folders = [tmp_path / "healthy", tmp_path / "faulty"]
    for folder in folders:
        folder.mkdir()
    healthy, faulty = map(Bench, folders)
    try:
        runs = [
            start(bench, name, fault) for bench, fault in ((healthy, "none"), (faulty, "error"))
        ]
        codes = [run.end(timeout_s=350) for run in runs]
    finally:
        for bench in (healthy, faulty):
            bench.close()
    text = "\n".join([*runs[0].out, *runs[0].err])
    assert codes[0] == 0 and re.search(r"loss \d", text), runs[0].report()
    assert "commlens:" not in text and "VERDICT" not in text, runs[0].report()
    assert not healthy.boxes_left and not healthy.dumped
    assert codes[1] != 0, runs[1].report()
    # Ray's and torchrun's
    prefix = re.compile(r"\x1b\[\d+m|\(RayTrainWorker pid=\d+\)|^\[rank\d\]:", re.MULTILINE)
    words = " ".join(prefix.sub("", "\n".join([*runs[1].out, *runs[1].err])).split())
    line = next(
        number
        for number, text in enumerate((EXAMPLES / "faults.py").read_text().splitlines(), 1)
        if "a bad batch" in text
    )
    assert (
        f"VERDICT rank 1 raised ValueError: a bad batch at faults.py:{line} misbehave" in words
    ), runs[1].report()
