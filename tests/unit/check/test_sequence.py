"""Tests of src/commlens/check/sequence.py."""

import msgspec

from commlens.check.sequence import Event, Guess, Issue, RankSequence, ThreadWait
from commlens.model.collective import (
    Channel,
    Collective,
    CollectiveArgs,
    Frame,
    FrameKind,
    ProcessGroup,
    State,
)

WORLD = Channel(ProcessGroup("0", (0, 1)), "cpu")
BARRIER = Collective(1, WORLD, 1, CollectiveArgs("barrier", "barrier"), State.ISSUED, 0)


def test_a_sequence_survives_the_way_between_processes() -> None:
    events: list[Event] = [Issue(BARRIER), ThreadWait(1, thread=7)]
    sequence = RankSequence(1, 2, events=events)
    read = msgspec.msgpack.decode(msgspec.msgpack.encode(sequence), type=RankSequence)
    assert read == sequence
    assert read.ops == [BARRIER]


def test_a_guess_names_the_line_of_the_user() -> None:
    stack = (
        Frame("/torch/_tensor.py", 3, "item", FrameKind.TORCH),
        Frame("/home/me/train.py", 81, "main"),
    )
    found = Guess("value", stack).source
    assert found is not None and found.where == "train.py:81"
