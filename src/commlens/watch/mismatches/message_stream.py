"""Pairing of point-to-point messages: which send matches which receive."""

from __future__ import annotations

from dataclasses import dataclass, field

from commlens.model.collective import Channel
from commlens.model.ops import matches_by_tag
from commlens.watch.mismatches.channel_progress import MAX_PENDING
from commlens.watch.mismatches.signatures import SignatureId


@dataclass(slots=True)
class MessageStream:
    """The sends and receives between a sender and a receiver that are not paired yet."""

    channel: Channel
    sender: int
    receiver: int
    # (tag, number): signature, is a send
    unmatched: dict[tuple[int, int], tuple[SignatureId, bool]] = field(default_factory=dict)
    dropped: int = 0  # unmatched messages that were discarded
    # sends can no longer be assigned to receives, so nothing more is compared
    pairing_lost: bool = False


@dataclass(slots=True)
class StreamEnd:
    """The sender's or the receiver's side of a stream."""

    stream: MessageStream
    is_sender: bool
    newest: int = 0  # sequence number
    counts: dict[int, int] = field(default_factory=dict)  # tag: messages so far
    has_gap: bool = False

    def match(
        self, signature: SignatureId, number: int, tag: int
    ) -> tuple[SignatureId, SignatureId] | None:
        """Add a message; return the signatures of the send and the receive if its counterpart was
        added before.

        Messages of one tag are matched in order of issue.
        """
        stream = self.stream
        if stream.pairing_lost:
            return None
        if not matches_by_tag(stream.channel.group.backend):
            tag = 0
        if number == self.newest + 1:
            count = self.counts.get(tag, 0) + 1
        elif number > self.newest:
            # records were overwritten before they were read; with a single tag, the sequence number
            # still is the count
            self.has_gap = True
            count = number
        else:
            stream.pairing_lost = True  # issued by several threads at once
            return None
        self.newest = number
        self.counts[tag] = count
        if self.has_gap and len(self.counts) > 1:
            stream.pairing_lost = True
            stream.unmatched.clear()
            return None
        other = stream.unmatched.get((tag, count))
        if other is None or other[1] == self.is_sender:
            stream.unmatched[(tag, count)] = (signature, self.is_sender)
            if len(stream.unmatched) > MAX_PENDING:
                del stream.unmatched[next(iter(stream.unmatched))]
                stream.dropped += 1
            return None
        del stream.unmatched[(tag, count)]
        return (signature, other[0]) if self.is_sender else (other[0], signature)
