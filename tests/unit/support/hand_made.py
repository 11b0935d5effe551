"""What each process records of groups that are made by hand: the logs of a simulated job, told as
the processes of several worlds tell them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from commlens.model.collective import Channel, Collective, HandMade, ProcessGroup
from commlens.model.ranklog import RankLog


def as_recorded(
    logs: Sequence[RankLog],
    worlds: Mapping[str, range],
    by_hand: Mapping[str, str],
    *,
    ordinals: Mapping[str, int] | None = None,
) -> list[RankLog]:
    """Return the logs as the processes record them.

    Args:
        logs: of one job.
        worlds: a program's command line -> the ranks that are its world, in which they count from
            0.
        by_hand: a group's name -> the store by which its members know it; "" at the end of a
            name's group: the program gives it no name.
        ordinals: a group's name -> how many such groups its members had made before.
    """

    def recorded(op: Collective, rank: int, first: int) -> Collective:
        group, root, peer = op.channel.group, op.args.root, op.peer
        if group.name in by_hand:
            places = {member: place for place, member in enumerate(group.ranks)}
            made = HandMade(
                places[rank],
                len(places),
                by_hand[group.name],
                (ordinals or {}).get(group.name, 0),
            )
            new = ProcessGroup("", (), backend=group.backend, hand_made=made)
        else:
            places = {member: member - first for member in group.ranks}
            new = msgspec.structs.replace(group, ranks=tuple(places.values()))
        return msgspec.structs.replace(
            op,
            channel=Channel(new, op.channel.device, op.channel.runs_ahead),
            args=msgspec.structs.replace(op.args, root=places.get(root)),
            peer=places.get(peer),
        )

    return [
        msgspec.structs.replace(
            log,
            rank=log.rank - ranks[0],
            world_size=len(ranks),
            job=script,
            script=script,
            collectives=[recorded(op, log.rank, ranks[0]) for op in log.collectives],
        )
        for script, ranks in worlds.items()
        for log in logs
        if log.rank in ranks
    ]
