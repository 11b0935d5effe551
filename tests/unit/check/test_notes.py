"""What is noted of a rank's run."""

from __future__ import annotations

from commlens.check.notes import RankNotes, stack_of_traceback
from commlens.check.sequence import Leave, RankSequence


def test_each_line_is_noted_once_and_each_guess_with_the_events_before_it() -> None:
    notes = RankNotes(RankSequence(0, 2))
    notes.add(Leave())
    for _ in range(2):
        notes.note_unseen("store", "localhost:1")
        notes.guess("poll")
    assert [unseen.name for unseen in notes.sequence.unseen] == ["localhost:1"]
    assert [(guess.what, guess.after) for guess in notes.sequence.guesses] == [("poll", 1)] * 2


def test_stacks_begin_at_the_callers_line_and_are_shared() -> None:
    notes = RankNotes(RankSequence(0, 2))
    one, other = [notes.stack() for _ in range(2)]
    assert one is other and one[0].file == __file__


def test_events_after_the_end_of_the_run_are_left_out() -> None:
    notes = RankNotes(RankSequence(0, 2))
    notes.sequence.cut_off = True
    notes.add(Leave())
    assert not notes.sequence.events


def test_the_innermost_frame_of_a_traceback_is_the_first() -> None:
    try:
        int("x")
    except ValueError as error:
        (frame,) = stack_of_traceback(error.__traceback__)
    assert frame.function == test_the_innermost_frame_of_a_traceback_is_the_first.__name__
