"""Interned signatures: ranks that agree compare two small integers instead of the arguments
themselves.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable, Hashable
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
    """A rank's call of one sequence number, without its stack and step."""

    # the arguments of a collective or message, or those of every member of a coalesced group
    parts: tuple[CollectiveArgs, ...]
    blob: ArgsJson | None = None  # None for a coalesced group, and if the reduce op was added


class SignatureTable:
    """The signatures of all ranks, interned by their bytes. Memory stays bounded."""

    def __init__(self) -> None:
        self.signatures: dict[SignatureId, Signature] = {}
        # reduce op recorded later, or all ranks compared together
        self.needs_more: set[SignatureId] = set()
        self.needs_all_ranks: set[SignatureId] = set()
        self.digests: BoundedCache[SignatureId, int] = BoundedCache(self._digest)
        self._ids: dict[Hashable, SignatureId] = {}
        self._next_id = itertools.count(1)

    def parts(self, signature: SignatureId) -> tuple[CollectiveArgs, ...]:
        """Return the arguments of each member; none if they are unknown or were forgotten."""
        known = self.signatures.get(signature)
        return known.parts if known is not None else ()

    def _digest(self, signature: SignatureId) -> int:
        """Return 32 bits of what all ranks of a group must have alike, equal on all nodes; 0 if it
        is unknown.
        """
        same = [
            (
                args.op,
                args.root,
                args.reduce_op,
                tuple(tensor.dtype for tensor in args.payload[:1]),
                ()
                if args.op in UNEVEN
                else tuple(math.prod(tensor.shape) for tensor in args.payload),
            )
            for args in self.parts(signature)
        ]
        return zlib.crc32(repr(same).encode()) if same else 0

    def intern(self, payload: bytes | None) -> SignatureId:
        """Return the id of the signature in a blob's payload; 0 if it is damaged."""
        if payload is None:
            return 0
        signature = self._ids.get(payload, 0)
        if not signature and isinstance(blob := decode_blob(payload), ArgsJson):
            args = decode_args(blob, 0)
            signature = self._add(payload, Signature((args,), blob))
            if args.op in REDUCING:
                self.needs_more.add(signature)
        return signature

    def intern_group(self, members: tuple[SignatureId, ...]) -> SignatureId:
        """Return the id of a coalesced group's signature; 0 if a member is unknown."""
        if not all(members):
            return 0
        return self._ids.get(members) or self._add(
            members, Signature(tuple(part for each in members for part in self.parts(each)))
        )

    def with_reduce_op(self, signature: SignatureId, reduce_code: int) -> SignatureId:
        """Return the id of a signature with the reduce op that was recorded later; 0 if it is
        unknown.
        """
        key = ("reduce op", signature, reduce_code)
        known = self._ids.get(key, 0)
        if not known and (original := self.signatures.get(signature)) and original.blob:
            known = self._add(key, Signature((decode_args(original.blob, reduce_code),)))
        return known

    def _add(self, key: Hashable, signature: Signature) -> SignatureId:
        if len(self._ids) >= CACHE_SIZE:
            # ids are never reused: an old and a new id of equal signatures are then compared by
            # value
            self._ids.clear()
        number = self._ids[key] = next(self._next_id)
        self.signatures[number] = signature
        if any(args.op == "all_to_all" for args in signature.parts):
            self.needs_more.add(number)
            self.needs_all_ranks.add(number)
        if len(self.signatures) > 2 * CACHE_SIZE:
            oldest = next(iter(self.signatures))
            del self.signatures[oldest]
            self.needs_more.discard(oldest)
            self.needs_all_ranks.discard(oldest)
        return number
