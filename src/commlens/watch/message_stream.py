"""Point-to-point messages from one rank to another: which send meets which receive."""

from __future__ import annotations

from dataclasses import dataclass, field

from commlens.model.collective import Channel
from commlens.model.ops import matches_by_tag
from commlens.watch.channel_progress import KEPT
from commlens.watch.signatures import SignatureId


@dataclass(slots=True)
class MessageStream:
    """The messages from one rank to another that have not met their other half."""

    channel: Channel
    sender: int
    receiver: int
    unmatched: dict[tuple[int, int], tuple[SignatureId, bool]] = field(default_factory=dict)  # (tag, count): signature, is a send
    dropped: int = 0  # messages that were forgotten unmatched
    unpaired: bool = False  # which send meets which receive is no longer known


@dataclass(slots=True)
class StreamEnd:
    """The sender's or the receiver's side of a stream."""

    stream: MessageStream
    is_sender: bool
    newest: int = 0  # sequence number
    counts: dict[int, int] = field(default_factory=dict)  # tag: messages so far
    has_gap: bool = False

    def match(self, signature: SignatureId, number: int, tag: int) -> tuple[SignatureId, SignatureId] | None:
        """Add a message, and return the signatures of the send and the receive if its other half was added before.

        Messages of one tag are matched first in, first out.
        """
        stream = self.stream
        if stream.unpaired:
            return None
        if not matches_by_tag(stream.channel.group.backend):
            tag = 0
        if number == self.newest + 1:
            count = self.counts.get(tag, 0) + 1
        elif number > self.newest:
            self.has_gap = True  # overwritten before they were read; with only one tag the sequence numbers still count
            count = number
        else:
            stream.unpaired = True  # issued by several threads at once
            return None
        self.newest = number
        self.counts[tag] = count
        if self.has_gap and len(self.counts) > 1:
            stream.unpaired = True
            stream.unmatched.clear()
            return None
        other = stream.unmatched.get((tag, count))
        if other is None or other[1] == self.is_sender:
            stream.unmatched[(tag, count)] = (signature, self.is_sender)
            if len(stream.unmatched) > KEPT:
                del stream.unmatched[next(iter(stream.unmatched))]
                stream.dropped += 1
            return None
        del stream.unmatched[(tag, count)]
        return (signature, other[0]) if self.is_sender else (other[0], signature)
