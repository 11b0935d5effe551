"""Words about ranks that the errors of others name."""

from __future__ import annotations

from commlens.diagnosis.causes.context import Context
from commlens.diagnosis.causes.told_by_errors import FoundInErrors
from commlens.diagnosis.words import phrases
from commlens.diagnosis.words.finding import Words
from commlens.diagnosis.words.phrases import prose
from commlens.model.cause import ErrorReport, ToldByErrors
from commlens.text import capital, frame_phrase, ranks_and_verb, ranks_phrase, sentence, verb

_SHOWN = 4
_DO: dict[ErrorReport, tuple[str, str]] = {
    "op": ("issues {}", "issue {}"),
    "shape": ("passes a tensor of shape {}", "pass tensors of shape {}"),
    "dtype": ("passes a tensor of dtype {}", "pass tensors of dtype {}"),
    "parameters": ("passes {} to DDP", "pass {} to DDP"),
}
"""What one rank does, and what several do."""


def words(context: Context, found: FoundInErrors) -> Words:
    """Return what a finding says about ranks that errors tell of."""
    match found.cause.report:
        case "checkpoint":
            return _failed(context, found)
        case "sizes":
            return _too_large(context, found)
        case "barrier":
            return _absent(context, found)
        case _:
            return _differ(context, found)


def _differ(context: Context, found: FoundInErrors) -> Words:
    cause, told = found.cause, found.told
    culprits, raised = cause.culprits, cause.raised
    usual, *others = cause.sides
    shown = [*others[: _SHOWN - 1], usual] if culprits else cause.sides[:_SHOWN]
    sides = [
        ranks_and_verb(side.ranks, *(do.format(side.did) for do in _DO[cause.report]))
        for side in shown
    ]
    where = frame_phrase(found.line)
    numbers = (
        ""
        if cause.global_ranks
        else "The numbers in the texts are those of a smaller group's ranks."
    )
    return Words(
        summary=f"{' where '.join(sides)}, as torch's own check tells",
        explanation=prose(
            f"{capital(ranks_phrase(raised))} raised its error{f' at {where}' if where else ''}.",
            numbers,
        ),
        next_step=_differ_step(cause),
        evidence=_texts(context, raised),
        would_raise_confidence=(
            None
            if culprits and len(told) == context.job.size
            else (
                f"The texts tell what {ranks_phrase(told)} did, not the others."
                if culprits
                else "The texts do not tell which side is wrong."
            )
        ),
    )


def _differ_step(cause: ToldByErrors) -> str:
    subject = ranks_phrase(cause.culprits) if cause.culprits else "these ranks"
    if cause.report == "parameters":
        return (
            f"compare the model of {subject} with that of the others: its parameters, and those"
            " that DDP ignores"
        )
    comes = verb(cause.culprits or cause.raised, "comes", "come")
    return f"find out why {subject} {comes} to another collective"


def _failed(context: Context, found: FoundInErrors) -> Words:
    cause = found.cause
    culprits, named = cause.culprits, cause.named
    error = (cause.error or "").partition(". ")[0]
    others = sorted(set(cause.raised) - set(culprits))
    subject = f"{ranks_phrase(named) if named else 'a rank'}{'' if culprits else ' of its group'}"
    where = frame_phrase(found.line)
    return Words(
        summary=(
            f"{subject} failed in a distributed"
            f" checkpoint{f' at {where}' if where else ''}{f': {error}' if error else ''}"
        ),
        explanation=(
            f"{capital(ranks_and_verb(others, 'raises', 'raise'))} its error: a checkpoint fails on"
            " all ranks."
            if others
            else ""
        ),
        next_step=(
            f"look at the file {cause.file}: its size, its owner, and how it was written"
            if cause.file
            else f"look at the files of the checkpoint that {subject}"
            f" {verb(culprits, 'reads or writes', 'read or write')}"
        ),
        evidence=_texts(context, cause.raised),
        would_raise_confidence=(
            None if culprits else "The texts do not name one rank of the whole job."
        ),
    )


def _absent(context: Context, found: FoundInErrors) -> Words:
    cause = found.cause
    named, where = cause.named, frame_phrase(found.line)
    subject = f"{ranks_phrase(named)}{'' if cause.global_ranks else ' of their group'}"
    return Words(
        summary=(
            f"{subject} did not come to the monitored barrier"
            f"{f' at {where}' if where else ''}, as the error of its first rank tells"
        ),
        next_step=(
            f"look at the last lines of the output of {subject}; in the next run, take a stack"
            " (py-spy dump) before the barrier's timeout"
        ),
        evidence=_texts(context, cause.raised),
        would_raise_confidence=(
            "That error may name only the first rank that did not come (wait_all_ranks=False), and"
            " no line tells what it did instead."
            if len(named) == 1
            else "No line tells what they did instead."
        ),
    )


def _too_large(context: Context, found: FoundInErrors) -> Words:
    raised, where = found.cause.raised, frame_phrase(found.line)
    return Words(
        summary=(
            f"{ranks_phrase(raised)} received {found.cause.error}: ranks pass tensors of different"
            " sizes to one collective"
        ),
        next_step=(
            "compare the sizes that all ranks"
            f" pass{f' at {where}' if where else ' to their last collective'}"
        ),
        evidence=_texts(context, raised),
        would_raise_confidence="The records of `commlens launch` would show the size on each rank.",
    )


def _texts(context: Context, ranks: list[int]) -> list[str]:
    """``["rank 0 raised RuntimeError: DDP expects same model ..."]``; ranks with one text share a
    sentence.
    """
    return [sentence(end) for end in phrases.exits_alike(context, ranks)[:_SHOWN]]
