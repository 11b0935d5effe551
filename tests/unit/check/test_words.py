"""Tests of src/commlens/check/words.py."""

from sequences import Player, play

from commlens.check import words
from commlens.check.judge import judge
from commlens.check.schedule import RULES, schedule
from commlens.check.sequence import Guess
from commlens.model.verdict import Finding, Verdict


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


def test_a_fault_without_an_explanation_is_told_in_a_whole_sentence() -> None:
    sequences = play(2, lambda rank: rank.recv(1 - rank.rank))
    outcome = schedule(sequences, RULES["gloo"])
    finding = Finding(
        kind="undetermined",
        why="unknown",
        root_cause=True,
        culprits=[],
        victims=[0, 1],
        confidence="low",
        summary="ranks 0-1 wait",
    )
    found = Verdict(kind="undetermined", summary=finding.summary, findings=[finding])
    verdict = words.fault(found, outcome, "gloo")
    assert verdict.explanation == "Ranks 0-1 wait for ever in every run on gloo."
    assert verdict.findings[0].explanation == verdict.explanation


def test_an_order_of_messages_that_only_some_runs_have() -> None:
    def program(rank: Player) -> None:
        if rank.rank == 0:
            rank.recv(None)
            rank.recv(1)
        else:
            rank.send(0)

    explanation = judge(play(3, program), backend="gloo").verdict.explanation
    assert "wait for ever in a run on gloo in which the messages come in this order" in explanation
