"""Traces of all ranks of a job."""

from __future__ import annotations

from traces import Recorder, training

import commlens
from commlens.model.trace import Phase, TraceData


def ranks(*changed: tuple[int, TraceData]) -> list[commlens.Trace]:
    different = dict(changed)
    return [commlens.Trace(different.get(rank) or training(rank)) for rank in range(8)]


def one_more(rank: int, *layers: int) -> TraceData:
    def change(rec: Recorder, step: int) -> None:
        for layer in layers:
            rec.issue("all_gather", "tp", Phase.BACKWARD, f"MLP.layers.{layer}", 4000, 40)

    return training(rank, change=change)
