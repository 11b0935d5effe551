"""Compare a send with the receive that it meets."""

from __future__ import annotations

from commlens.matching.answer import Agree, Answer, Disagree, Party, Severity, Unknown
from commlens.matching.tensors import show_tensors, total, wire_dtype
from commlens.model.collective import Asked


def compare_pair(sender: int, sent: Asked, receiver: int, received: Asked) -> Answer:
    """Whether a send and its receive carry the same. Of two, neither is the odd one: ``minority`` is empty.

    Tags are not compared here: they decide which send meets which receive (gloo), or nothing (NCCL).
    """
    out = sent.inputs or sent.outputs
    into = received.outputs or received.inputs
    if not out or not into:
        return Unknown(("shape", "dtype"))
    parties = (Party((sender,), f"sends {show_tensors(out)}"), Party((receiver,), f"receives {show_tensors(into)}"))
    detail = "; ".join(f"rank {party.ranks[0]} {party.what}" for party in parties)
    if total(out) != total(into) or {wire_dtype(s) for s in out} != {wire_dtype(s) for s in into}:
        return Disagree("p2p", Severity.ILLEGAL, (), parties, detail)
    return Agree()
