"""Which frames are the user's, and which thread runs them."""

from __future__ import annotations

import pytest
from builders import SCRIPT

from commlens.model.collective import Frame, FrameKind
from commlens.model.frames import frame_kind, kind_prefixes
from commlens.model.ranklog import RankLog, ThreadStack

PREFIXES = kind_prefixes(
    {
        "prefixes": {
            "torch": "/v/lib/python3.12/site-packages/torch",
            "python": ["/usr/lib/python3.12"],
        }
    }
)
RAY = "/v/lib/python3.12/site-packages/ray/_private/worker.py"


@pytest.mark.parametrize(
    ("file", "kind"),
    [
        (SCRIPT, "user"),
        ("/home/me/ray/train.py", "user"),
        ("/home/me/transformers/my_model.py", "user"),
        ("/tmp/ipykernel_7/1234.py", "user"),
        ("<stdin>", "user"),
        (RAY, "library"),
        ("/home/me/src/accelerate/src/accelerate/accelerator.py", "library"),
        ("/home/me/DeepSpeed/deepspeed/runtime/engine.py", "library"),
        ("/home/me/pytorch-lightning/src/lightning/pytorch/trainer/trainer.py", "library"),
        ("/v/bin/torchrun", "library"),
        ("<string>", "user"),
        ("<decorator-gen-3>", "library"),
        ("/v/lib/python3.12/site-packages/torch/nn/modules/module.py", "torch"),
        # as torch's own dumps name them, where commlens is installed from its repository
        ("/home/me/commlens/src/commlens/tap/tap.py", "commlens"),
        ("/home/me/commlens/src/commlens/tracing/attribution/stacks.py", "commlens"),
        ("/home/me/commlens/train.py", "user"),
        ("/tmp/torchinductor_me/ab/cabc.py", "torch"),
        ("<eval_with_key>.3", "torch"),
        ("...", "python"),  # frames that were left out
        ("/usr/lib/python3.12/threading.py", "python"),
        ("<frozen runpy>", "python"),
    ],
)
def test_kinds_of_files(file: str, kind: str) -> None:
    assert frame_kind(file, PREFIXES).value == kind


def test_the_users_thread_counts_where_the_main_one_is_a_workers_loop() -> None:
    loop = ThreadStack(1, "MainThread", (Frame(RAY, 887, "main_loop", FrameKind.LIBRARY),), 5, True)
    training = ThreadStack(
        2,
        "train",
        (Frame(RAY, 3, "wrapper", FrameKind.LIBRARY), Frame(SCRIPT, 57, "load_batch")),
        5,
    )
    log = RankLog(0, 2, stacks=[loop, training])
    assert log.main_stack is training
    assert log.main_stack.source == training.frames[1]
    log.stacks.append(ThreadStack(3, "other", (Frame(SCRIPT, 70, "serve"),), 5))
    assert log.main_stack is loop, (
        "no thread has issued a collective yet, and two run the user's code"
    )
    own = ThreadStack(1, "MainThread", (*loop.frames, Frame(SCRIPT, 90, "main")), 6, True)
    log.stacks = [own, training]
    assert log.main_stack is own
