"""Tests of src/commlens/check/words.py."""

from sequences import play

from commlens.check import words
from commlens.check.rules import RULES
from commlens.check.schedule import schedule
from commlens.check.sequence import Guess


def test_each_limit_is_said_once() -> None:
    sequences = play(2, lambda rank: rank.recv(None))
    for sequence in sequences.values():
        sequence.guesses = [Guess("poll"), Guess("poll")]
        sequence.problem = "its run stood in train.py:9 load after 300 s"
    outcome = schedule(sequences, RULES["gloo"])
    outcome.incomplete = True
    texts = words.limits(sequences, outcome)
    assert len(texts) == len(set(texts)) == 4
    assert all(text.endswith(".") and text[0].isupper() for text in texts)
