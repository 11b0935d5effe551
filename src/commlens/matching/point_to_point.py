"""Pair sends with receives, and compare the two of a pair."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from commlens.matching.answer import Agree, Answer, Disagree, Party, Severity, Unknown
from commlens.matching.tensors import total, wire_dtype
from commlens.model.collective import Collective, CollectiveArgs
from commlens.model.ops import matches_by_tag
from commlens.text import rank_phrase, tensors_phrase

Pair = tuple[Collective | None, Collective | None]
"""A send and its receive; None for the side that is missing."""


def pair_messages(
    sends: Sequence[Collective], receives: Sequence[Collective], *, complete: bool
) -> list[Pair]:
    """Pair the messages from one rank to another, both in order of issue.

    Sequence numbers count from the first message, so with a single tag they align even if older
    records were overwritten. With several tags they only align if no record is missing: if both are
    complete.

    Returns:
        All pairs, including those with only one side; none if the pairing cannot be determined.
    """
    if not any(op.sequence_number for op in (*sends, *receives)):
        return []  # recording was switched on while the job ran
    tags = {op.tag for op in (*sends, *receives)}
    if len(tags) < 2 or not matches_by_tag((*sends, *receives)[0].channel.group.backend):
        by_number = {op.sequence_number: op for op in receives}
        pairs: list[Pair] = [(op, by_number.pop(op.sequence_number, None)) for op in sends]
        return pairs + [(None, op) for op in by_number.values()]
    if not complete:
        return []
    pairs = []
    for tag in sorted(tags):
        sent = [op for op in sends if op.tag == tag]
        received = [op for op in receives if op.tag == tag]
        pairs += zip_longest(sent, received)
    return pairs


def compare_pair(
    sender: int, sent: CollectiveArgs, receiver: int, received: CollectiveArgs
) -> Answer:
    """Compare a send with its receive. ``minority`` is empty: of two ranks, neither is the odd one.

    Tags are not compared: they decide which send meets which receive (gloo), or are ignored (NCCL).
    """
    out = sent.inputs or sent.outputs
    into = received.outputs or received.inputs
    if not out or not into:
        return Unknown(("shape", "dtype"))
    parties = (
        Party((sender,), f"sends {tensors_phrase(out)}"),
        Party((receiver,), f"receives {tensors_phrase(into)}"),
    )
    detail = "; ".join(f"{rank_phrase(party.ranks[0])} {party.phrase}" for party in parties)
    if total(out) != total(into) or {wire_dtype(spec) for spec in out} != {
        wire_dtype(spec) for spec in into
    }:
        return Disagree("p2p", Severity.ILLEGAL, (), parties, detail)
    return Agree()
