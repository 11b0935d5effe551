"""An examined job: the verdict and the evidence that it was drawn from."""

from __future__ import annotations

from typing import NamedTuple

from commlens.diagnosis.alignment import Mismatch
from commlens.diagnosis.index import World
from commlens.diagnosis.wait_graph import Graph
from commlens.matching.answer import Disagree
from commlens.matching.collectives import compare_coalesced
from commlens.model.collective import ChannelKey
from commlens.model.verdict import Verdict


class ExaminedJob(NamedTuple):
    """A verdict, and the indexed ranks, mismatches and wait-for graph behind it. Reports draw it and diagnose nothing."""

    verdict: Verdict
    world: World
    mismatches: list[Mismatch]
    graph: Graph

    def mismatch_at(self, key: ChannelKey, number: int) -> Disagree | None:
        """Return how the ranks disagree under one number of a channel; None if they agree or it cannot be determined."""
        tracks = {rank: self.world.views[rank].tracks.get(key) for rank in key[2] if rank in self.world.views}
        args = {rank: track.asked(number) for rank, track in tracks.items() if track is not None and number in track.ops}
        answer = compare_coalesced(args, key[2]) if len(args) > 1 else None
        return answer if isinstance(answer, Disagree) else None
