"""Words about keys of the job's store that ranks wait for and no rank writes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

from commlens.diagnosis.causes.context import Context
from commlens.diagnosis.causes.unwritten import FoundUnwritten
from commlens.diagnosis.index.job_index import RankView
from commlens.diagnosis.words import phrases
from commlens.diagnosis.words.activities import activity_words
from commlens.diagnosis.words.finding import Words
from commlens.diagnosis.words.phrases import prose
from commlens.text import capital, frame_phrase, key_phrase, op_phrase, ranks_and_verb, ranks_phrase

_OTHERS_MAX = 4


def words(context: Context, found: FoundUnwritten) -> Words:
    """Return what a finding says about a key that no rank writes."""
    if found.cause.written_before:
        return _write_skipped(context, found)
    return _writer_unknown(context, found)


def _write_skipped(context: Context, found: FoundUnwritten) -> Words:
    write, own, ranks = found.write, found.own, found.cause.ranks
    assert write is not None and own is not None
    op, (writer,) = found.edges[0].op, found.cause.culprits
    line, place = frame_phrase(write.source) or "an unknown line", frame_phrase(own.source)
    return Words(
        summary=(
            f"rank {writer} did not write the {key_phrase(op)};"
            f" {ranks_and_verb(ranks, 'waits', 'wait')} for it in {op.op}"
        ),
        explanation=prose(
            f"{phrases.name(context, writer)} waits for {ranks_phrase(ranks)} in"
            f" {op_phrase(own)}{f' at {place}' if place else ''}.",
            f"It wrote keys like this before, the first one ({write.channel.group.name!r}) at"
            f" {line}.",
            phrases.waiting(context, found.edges),
            phrases.waiting_behind(context, found.involved, found.blocked),
        ),
        next_step=f"find the branch in which rank {writer} skips {line}",
        would_raise_confidence=(
            "The store itself is not read: whether a process outside of the job writes such keys is"
            " not known."
        ),
    )


def _writer_unknown(context: Context, found: FoundUnwritten) -> Words:
    op, ranks = found.edges[0].op, found.cause.ranks
    return Words(
        summary=(
            f"{ranks_and_verb(ranks, 'waits', 'wait')} in {op.op} for the {key_phrase(op)}, which"
            " no rank is known to write"
        ),
        explanation=prose(
            phrases.waiting(context, found.edges),
            phrases.waiting_behind(context, ranks, found.blocked),
            _others(context, found.involved),
        ),
        next_step=(
            f"look for the line that writes the {key_phrase(op)}, and for why no rank has come"
            " there"
        ),
        would_raise_confidence=(
            "The store itself is not read: a process outside of the job may be meant to write the"
            " key."
        ),
    )


def _others(context: Context, waiting: Collection[int]) -> str:
    """Return a sentence about the ranks that wait for no key: their collectives or activities."""
    waits: dict[str, list[int]] = defaultdict(list)  # by op
    doing: dict[str, list[RankView]] = defaultdict(list)
    for rank, view in context.job.views.items():
        if rank not in waiting:
            block = next(iter(view.blocks.values()), None)
            if block is not None:
                waits[op_phrase(block.op)].append(rank)
            else:
                doing[activity_words(context.doing(view))].append(view)
    told = [(ranks, f"{ranks_and_verb(ranks, 'is', 'are')} in {op}") for op, ranks in waits.items()]
    for views in doing.values():
        ranks = [view.rank for view in views]
        told.append(
            (ranks, f"{ranks_phrase(ranks)} {activity_words(context.doing(views[0]), ranks)}")
        )
    parts = [text for _, text in sorted(told)[:_OTHERS_MAX]]
    return f"{capital('; '.join(parts))}." if parts else ""
