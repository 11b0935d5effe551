"""Evidence with holes and nonsense in it: never a crash, never another order's verdict, and always
a valid one.
"""

from __future__ import annotations

import random

import msgspec
import pytest
from builders import Die, Job, Stay, all_reduce, at, recv, send, training
from chosen import long
from verdict_schema import hold_to_schema

from commlens.diagnosis.examine import diagnose_logs
from commlens.model.collective import Collective, State
from commlens.model.ranklog import End, Observation, RankLog
from commlens.reports.terminal import render


def damage_op(dice: random.Random, op: Collective) -> None:
    change = dice.randrange(12)
    if change == 0:
        op.state = dice.choice(list(State))
    elif change == 1:
        op.stack = ()
    elif change == 2:
        op.announced_ns = op.returned_ns = 0
    elif change == 3:
        op.sequence_number = dice.choice([0, 1, op.sequence_number + dice.randint(-2, 2), 1 << 40])
        op.sequence_number = max(0, op.sequence_number)
    elif change == 4:
        op.args = msgspec.structs.replace(op.args, inputs=(), outputs=())
    elif change == 5:
        op.wait_began_ns, op.wait_ended_ns = dice.choice(
            [(0, 0), (op.announced_ns, 0), (0, op.announced_ns)]
        )
    elif change == 6:
        op.issue_thread = op.wait_thread = dice.randrange(3)
    elif change == 7:
        op.peer = dice.choice([None, 0, 99, -1])
    elif change == 8:
        group = msgspec.structs.replace(
            op.channel.group, ranks=dice.choice([(), (0,), (0, 1, 2, 3, 4, 5), (7, 9)])
        )
        op.channel = msgspec.structs.replace(op.channel, group=group)
    elif change == 9:
        op.coalescing_id, op.coalesced_members = dice.randint(0, 3), dice.randint(0, 2)
    elif change == 10:
        op.error, op.state = (
            dice.choice(["", "\n", "Connection closed by peer", "boom"]),
            State.FAILED,
        )
    else:
        op.args = msgspec.structs.replace(
            op.args, op=dice.choice(["send", "recv", "coalesced", "all_to_all", "barrier", "?"])
        )


def damage_log(dice: random.Random, log: RankLog) -> None:
    change = dice.randrange(9)
    if change == 0:
        log.collectives = log.collectives[dice.randint(0, len(log.collectives)) :]
    elif change == 1:
        log.collectives = log.collectives[: dice.randint(0, len(log.collectives))]
    elif change == 2:
        log.stacks = []
    elif change == 3:
        log.observation = Observation(
            dice.choice(list(End)),
            dice.choice([None, 0, 1, 143]),
            dice.choice([None, "SIGTERM", "SIGKILL"]),
        )
    elif change == 4:
        log.captured_ns = log.heartbeat_ns = 0
    elif change == 5:
        log.rank = dice.choice([-1, 0, 1, 50])
    elif change == 6:
        log.world_size = dice.choice([0, 2, 8, 64])
    elif change == 7:
        log.exception, log.closed = (
            dice.choice([None, "", "ValueError: x", "RuntimeError: Timed out"]),
            dice.random() < 0.5,
        )
    else:
        log.initialised, log.pid, log.host = False, 0, dice.choice(["", "a", "b"])


def exchange(job: Job, rank: int):  # type: ignore[no-untyped-def]
    for i in range(6):
        yield send(job.world, (rank + 1) % job.size, line=3, tag=i % 2)
        if (rank, i) == (2, 4):
            yield Stay(9, "tune")
        yield recv(job.world, (rank - 1) % job.size, line=4, tag=i % 2)
        yield all_reduce(job.world, 4, line=5)


PROGRAMS = [
    training(lambda *_: None),
    training(at(2, 5, Stay(57, "load_batch"))),
    training(at(2, 5)),
    training(at(1, 5, Die(Observation(End.KILLED, signal="SIGKILL")))),
    training(at(1, 5, lambda job: all_reduce(job.world, 7, line=20))),
    exchange,
]


@pytest.mark.parametrize("seed", [long(seed, when=seed >= 60) for seed in range(300)])
def test_nonsense_is_survived(seed: int) -> None:
    dice = random.Random(seed)
    logs = msgspec.convert(
        msgspec.to_builtins(Job(4).run(dice.choice(PROGRAMS)).logs()), list[RankLog]
    )
    for _ in range(dice.randint(1, 12)):
        log = dice.choice(logs)
        if log.collectives and dice.random() < 0.6:
            damage_op(
                dice, dice.choice(log.collectives[-4:] if dice.random() < 0.5 else log.collectives)
            )
        else:
            damage_log(dice, log)
    logs = dice.sample(logs, dice.randint(0, 4))
    verdict = diagnose_logs(logs)
    hold_to_schema(verdict)
    assert render(verdict)
    dice.shuffle(logs)
    assert diagnose_logs(logs) == verdict
