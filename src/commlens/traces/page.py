"""Composition of the page of one trace, or of one trace for each class of ranks."""

from __future__ import annotations

from collections.abc import Sequence

from commlens.model.network import Network
from commlens.model.trace import TraceData
from commlens.reports.trace_page import RankClasses, TimeEstimate, trace_page
from commlens.traces.network import collective_seconds, preset
from commlens.traces.summarise import answer


def page_of(
    traces: Sequence[TraceData],
    *,
    name: str,
    names: Sequence[str] = (),
    notes: Sequence[str] = (),
    ranks: RankClasses | None = None,
    network: Network | str | None = None,
) -> bytes:
    """Return the HTML page of one trace, or of one trace for each class of ranks.

    ``name`` is the run's; ``names`` are the traces', by default the same. A network may be a
    preset's name.
    """
    text = answer(traces[0])
    network = preset(network) if isinstance(network, str) else network
    return trace_page(
        traces,
        name=name,
        text=f"{ranks.answer}\n{text}" if ranks is not None else text,
        names=names or [name] * len(traces),
        notes=notes,
        ranks=ranks,
        estimates=None if network is None else [_time_estimate(data, network) for data in traces],
    )


def _time_estimate(data: TraceData, network: Network) -> TimeEstimate:
    seconds = [
        collective_seconds(
            event.op,
            data.group_of(event).ranks,
            event.wire_bytes,
            network,
            rank=data.rank,
            peer=event.peer,
        )
        for event in data.events
    ]
    return TimeEstimate(network.name, seconds)
