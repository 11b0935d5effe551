"""Amounts as people write them."""

from __future__ import annotations

from typing import Final

_UNITS: Final = ("B", "kB", "MB", "GB", "TB", "PB")


def size(amount: float) -> str:
    """``"512 B"``, ``"4.1 kB"``, ``"16.8 MB"``: decimal units, as networks are sold."""
    value = float(amount)
    unit = 0
    while abs(value) >= 999.5 and unit < len(_UNITS) - 1:
        value /= 1000
        unit += 1
    if unit == 0 or abs(value) >= 99.95:
        return f"{value:.0f} {_UNITS[unit]}"
    return f"{value:.1f} {_UNITS[unit]}"


def number(value: float) -> str:
    """``"12"``, ``"1,024"``, ``"2.5"``: as few digits as it takes."""
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:.4g}"
