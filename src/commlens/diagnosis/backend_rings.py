"""Torch 2.14 and later keep a ring for each backend, and leave a file for each: together they are one rank's dump."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from commlens.diagnosis.extract import Extract

_COLUMNS = ("number", "state", "record", "peer", "batch", "created_ns", "completed_ns")


def joined(several: Sequence[Extract]) -> Extract | None:
    """The extracts of one rank as one, in the order of issue; None where they are not the rings of different backends."""
    first, *others = several
    backends = [{channel.group.backend for channel in found.channels} for found in several]
    if not others or not all(backends) or sum(map(len, backends)) != len(set[str]().union(*backends)):
        return None
    order = np.argsort(np.concatenate([found.created_ns for found in several]), kind="stable")
    values: dict[str, Any] = {name: np.concatenate([getattr(found, name) for found in several])[order] for name in _COLUMNS}
    for name, tables in (("channel", "channels"), ("args_index", "args"), ("site", "sites")):
        parts, offset = [], 0
        for found in several:
            column = getattr(found, name)
            parts.append(np.where(column >= 0, column + offset, column))
            offset += len(getattr(found, tables))
        values[name] = np.concatenate(parts)[order].astype("int32")
    shift = max((int(found.batch.max(initial=0)) for found in several), default=0) + 1
    batches = [np.where(found.batch > 0, found.batch + shift * place, 0) for place, found in enumerate(several)]
    values["batch"] = np.concatenate(batches)[order].astype("int32")
    values["record"] = np.arange(len(order), dtype="int64")  # each ring counts from 0
    return dataclasses.replace(
        first,
        **values,
        channels=[channel for found in several for channel in found.channels],
        groups=[group for found in several for group in found.groups],
        args=[args for found in several for args in found.args],
        sites=[site for found in several for site in found.sites],
        status={name: status for found in several for name, status in found.status.items()},
        problems=[text for found in several for text in found.problems],
        world_size=max(found.world_size for found in several),
        captured_ns=max(found.captured_ns for found in several),
        issued=sum(found.issued for found in several),
        timed=all(found.timed for found in several),
        only_active=all(found.only_active for found in several),
        unbroken=0,  # of which ring?
    )
