"""Sets of ranks as people write them: ``0-1,3``."""

from __future__ import annotations

from collections.abc import Iterable


def format_ranks(ranks: Iterable[int]) -> str:
    """Compress ranks, e.g. ``[0, 1, 3] -> "0-1,3"`` and ``[0, 8, 16, 24] -> "0-24:8"`` (stride after the colon).

    A stride is used from four members on. Duplicates are dropped and the order does not matter.
    """
    left = sorted(set(ranks))
    parts: list[str] = []
    start = 0
    while start < len(left):
        end = start + 1
        stride = left[end] - left[start] if end < len(left) else 1
        while end + 1 < len(left) and left[end + 1] - left[end] == stride:
            end += 1
        if end >= len(left):
            parts.append(str(left[start]))
            break
        count = end - start + 1
        if stride == 1 and count >= 2:
            parts.append(f"{left[start]}-{left[end]}")
        elif count >= 4:
            parts.append(f"{left[start]}-{left[end]}:{stride}")
        else:
            parts.append(str(left[start]))
            start += 1
            continue
        start = end + 1
    return ",".join(parts)


def parse_ranks(text: str, *, limit: int = 1_000_000) -> tuple[int, ...]:
    """The inverse of :func:`format_ranks`.

    Args:
        text: for example ``"0-1,3"`` or ``"0-24:8"``; empty gives no ranks.
        limit: the most ranks accepted, since the text may come from a damaged file.

    Raises:
        ValueError: when the text is not a set of ranks or names more than ``limit`` of them.
    """
    ranks: list[int] = []
    for part in text.split(","):
        if not part.strip():
            continue
        span, _, step_text = part.partition(":")
        first_text, dash, last_text = span.partition("-")
        try:
            first = int(first_text)
            last = int(last_text) if dash else first
            step = int(step_text) if step_text else 1
        except ValueError:
            raise ValueError(f"not a set of ranks: {text[:80]!r}") from None
        if step < 1 or last < first or len(ranks) + (last - first) // step + 1 > limit:
            raise ValueError(f"not a set of ranks: {text[:80]!r}")
        ranks.extend(range(first, last + 1, step))
    return tuple(ranks)


_LONGEST = 80  # characters of a set of ranks in a sentence


def ranks_phrase(ranks: Iterable[int]) -> str:
    """``"rank 2"``, ``"ranks 0-1,3"``; of a set that takes many words its beginning: ``"ranks 1,3-9,... (3967 in all)"``."""
    members = sorted(set(ranks))
    if len(members) == 1:
        return f"rank {members[0]}"
    text = format_ranks(members)
    if len(text) > _LONGEST:
        text = f"{text[: text.rindex(',', 0, _LONGEST - 20)]},... ({len(members)} in all)"
    return f"ranks {text}"
