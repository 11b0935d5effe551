"""The silent errors that the literature reports, in real gloo jobs: those that make ranks differ
are found, and the others, which are the same on all ranks, are not taken for anything else.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from chosen import chosen, long
from silent_errors import AT
from test_numbers import reported
from test_verify_strict import launch
from zygote_client import Zygote

TIMEOUT_S = 900
EVERY_STEP = "1"

# case, why, the first tensor, the step, the ranks to blame
FOUND = [
    ("moved-after-ddp", "gradient", "0.norm.weight", 1, []),
    ("wrapper-bypassed", "gradient", "0.norm.weight", 1, []),
    ("message-lost", "gradient", "0.norm.weight", AT, [3]),
    ("unfrozen-after-ddp", "gradient", "0.left.weight", 1, []),
    ("shared-data", "same-batch", "input 0", 2, []),
    ("parameter-left-out-later", "gradient", "1.left.weight", AT, []),
    ("partial-norm-later", "gradient", "0.norm.weight", AT, []),
    ("partial-norm-in-megatron", "gradient", "0.norm.weight", 1, []),
    ("partial-router-in-megatron", "gradient", "0.router.weight", 1, []),
    ("local-clipping-in-megatron", "gradient", "0.bias", 1, []),
    ("local-clipping-dtensor", "gradient", "0.right.bias", 1, []),
    ("other-dropout", "rng", "0.right.bias", 1, []),
]
USUAL = ("message-lost", "partial-norm-in-megatron")
THE_SAME_ON_ALL_RANKS = [
    "other-scale",
    "local-token-count",
    "optimizer-before-fsdp",
    "wrong-mask",
    "wrong-mask-in-megatron",
    "expert-scale",
]

pytestmark = pytest.mark.timeout(TIMEOUT_S + 20)


@pytest.fixture(scope="module")
def launched(
    request: pytest.FixtureRequest, zygote: Zygote, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str]:
    """Run the jobs of all chosen tests. One process imports torch for all of them."""
    out = tmp_path_factory.mktemp("errors")
    jobs = dict.fromkeys(job for (job,) in chosen(request, "job"))
    return out, launch(
        zygote, out, "silent_errors", EVERY_STEP, *jobs, environ={}, timeout_s=TIMEOUT_S
    )


@pytest.mark.parametrize(
    ("job", "why", "tensor", "step", "culprits"),
    [long(f"{case}:4", *expected, when=case not in USUAL, id=case) for case, *expected in FOUND],
)
def test_an_error_that_makes_ranks_differ_is_found(
    launched: tuple[Path, str], job: str, why: str, tensor: str, step: int, culprits: list[int]
) -> None:
    verdicts, _ = reported(launched, job)
    first = verdicts[0]
    assert (first["kind"], first["why"], first["culprits"]) == ("diverged", why, culprits)
    assert (first["cause"]["tensors"][0]["name"], first["cause"]["step"]) == (tensor, step)


@pytest.mark.parametrize("job", [long("local-loss:4")])
def test_losses_that_the_program_says_to_be_equal(launched: tuple[Path, str], job: str) -> None:
    verdicts, _ = reported(launched, job)
    assert [each["cause"]["tensors"][0]["name"] for each in verdicts] == ["loss"]


@pytest.mark.parametrize("job", [long(f"{case}:4", id=case) for case in THE_SAME_ON_ALL_RANKS])
def test_nothing_is_said_of_what_is_the_same_on_all_ranks(
    launched: tuple[Path, str], job: str
) -> None:
    assert reported(launched, job) == ([], [])
