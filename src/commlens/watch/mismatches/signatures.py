"""Interned signatures: ranks that agree compare two small integers instead of the arguments
themselves.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from commlens.blackbox.blobs import ArgsJson, decode_args, decode_blob
from commlens.model.collective import CollectiveArgs
from commlens.model.ops import REDUCING, UNEVEN

SignatureId = int
"""Identifies an interned signature; 0: unknown."""

CACHE_SIZE: Final = 20_000  # bounds every cache, because a program may vary its shapes forever

Key = TypeVar("Key")
Value = TypeVar("Value")


class BoundedCache(dict[Key, Value]):
    """Values loaded on first use; cleared when full."""

    def __init__(self, load: Callable[[Key], Value]) -> None:
        super().__init__()
        self._load = load

    def __missing__(self, key: Key) -> Value:
        if len(self) > CACHE_SIZE:
            self.clear()
        value = self[key] = self._load(key)
        return value


@dataclass(slots=True)
class Signature:
    """The arguments of a collective or message, or those of every member of a coalesced group."""

    blob: ArgsJson | None  # None for a coalesced group
    args: CollectiveArgs | None  # of a coalesced group: those of its first member
    members: tuple[CollectiveArgs, ...] = ()  # of a coalesced group

    @property
    def parts(self) -> tuple[CollectiveArgs, ...]:
        """The members of a coalesced group; otherwise the arguments as the only member."""
        return self.members or ((self.args,) if self.args is not None else ())


class SignatureTable:
    """The signatures of all ranks, interned by their bytes. Memory stays bounded."""

    def __init__(self) -> None:
        self.signatures: dict[SignatureId, Signature] = {}
        # reduce op recorded later, or all ranks compared together
        self.needs_more: set[SignatureId] = set()
        self.needs_all_ranks: set[SignatureId] = set()
        self._digests: dict[SignatureId, int] = {}
        self._ids: dict[bytes | tuple[SignatureId, ...], SignatureId] = {}
        self._next_id = itertools.count(1)

    def get(self, signature: SignatureId) -> Signature | None:
        """Return the signature, or None if it is unknown or was forgotten."""
        return self.signatures.get(signature)

    def digest(self, signature: SignatureId) -> int:
        """Return 32 bits of what all ranks of a group must have alike, equal on all nodes; 0 if it
        is unknown.
        """
        digest = self._digests.get(signature)
        if digest is None:
            known = self.signatures.get(signature)
            if len(self._digests) > CACHE_SIZE:
                self._digests.clear()
            same = [_must_agree(part) for part in known.parts] if known is not None else []
            digest = self._digests[signature] = zlib.crc32(repr(same).encode()) if same else 0
        return digest

    def op(self, signature: SignatureId) -> str:
        """Return the wire op; empty if it is unknown."""
        known = self.signatures.get(signature)
        return known.args.op if known is not None and known.args is not None else ""

    def intern(self, payload: bytes | None) -> SignatureId:
        """Return the id of the signature in a blob's payload."""
        if payload is None:
            return 0
        signature = self._ids.get(payload)
        if signature is None:
            blob = decode_blob(payload)
            if not isinstance(blob, ArgsJson):
                return 0
            if len(self._ids) >= CACHE_SIZE:
                # ids are never reused: an old and a new id of equal signatures are then compared by
                # value
                self._ids.clear()
            signature = self._ids[payload] = next(self._next_id)
            args = decode_args(blob, 0)
            self.signatures[signature] = Signature(blob, args)
            if args.op in REDUCING or args.op == "all_to_all":
                self.needs_more.add(signature)
            if args.op == "all_to_all":
                self.needs_all_ranks.add(signature)
            if len(self.signatures) > 2 * CACHE_SIZE:
                oldest = next(iter(self.signatures))
                del self.signatures[oldest]
                self.needs_more.discard(oldest)
                self.needs_all_ranks.discard(oldest)
        return signature

    def intern_group(self, members: tuple[SignatureId, ...]) -> SignatureId:
        """Return the id of a coalesced group's signature; 0 if a member is unknown."""
        if not all(members):
            return 0
        signature = self._ids.get(members)
        if signature is None:
            signature = self._ids[members] = next(self._next_id)
            parts = tuple(
                part.args
                for member in members
                if (part := self.get(member)) is not None and part.args is not None
            )
            self.signatures[signature] = Signature(None, parts[0] if parts else None, parts)
            if any(member in self.needs_all_ranks for member in members):
                self.needs_more.add(signature)
                self.needs_all_ranks.add(signature)
        return signature

    def with_reduce_op(self, signature: SignatureId, reduce_op: int) -> CollectiveArgs | None:
        """Return the arguments with the reduce op that was recorded later; None if they are
        unknown.
        """
        known = self.get(signature)
        return (
            decode_args(known.blob, reduce_op)
            if known is not None and known.blob is not None
            else None
        )


def _must_agree(args: CollectiveArgs) -> tuple[object, ...]:
    sizes = () if args.op in UNEVEN else tuple(math.prod(tensor.shape) for tensor in args.payload)
    return (args.op, args.root, tuple(tensor.dtype for tensor in args.payload[:1]), sizes)
