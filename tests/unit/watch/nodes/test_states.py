"""The states of ranks, as nodes send them to each other."""

from __future__ import annotations

import zlib
from types import SimpleNamespace

import pytest
from builders import Job, Stay, all_reduce

from commlens.diagnosis.fold.alike import state_key
from commlens.diagnosis.standstill import pose_key
from commlens.watch.nodes import states as module
from commlens.watch.nodes.states import States, fit, pack_states, ranks_in, unpack_states

WAIT, OTHER = b"waits in dp0", b"waits in dp1"


def test_answers_of_nodes_are_joined() -> None:
    states = States({WAIT: 0b11}, alone=0b100, poses={b"still": 0b1})
    states.add(States({WAIT: 0b11000, OTHER: 1 << 70_000}, poses={b"still": 0b100}))
    states.add(States({WAIT: 0b11000}))
    assert states.poses == {b"still": 0b101}
    assert sorted(map(sorted, states.classes())) == [[0, 1, 3, 4], [2], [70_000]]
    assert states.ranks == {0, 1, 2, 3, 4, 70_000}
    assert not states.too_many


def test_an_answer_is_read_as_it_was_packed_and_only_for_its_request() -> None:
    poses = {b"still": 0b101, b"too": 1 << 99_999}
    states = States({WAIT: 0b1101, OTHER: 1 << 99_999}, alone=0b10, poses=poses)
    packed = pack_states(states, (3, 7))
    assert unpack_states(packed, (3, 7)) == states
    assert unpack_states(packed, (3, 8)) is None
    assert len(packed) < 250, "a hundred thousand ranks need no more"


@pytest.mark.parametrize("content", [b"", b"no answer", zlib.compress(b"\xff\xff")])
def test_a_damaged_answer_is_none(content: bytes) -> None:
    assert unpack_states(content, (3, 7)) is None


def test_too_many_states_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STATES_MAX", 3)
    states = States({})
    for rank in range(4):
        states.add(States({bytes([rank]): 1 << rank}))
    answer = unpack_states(pack_states(states, (0, 1)), (0, 1))
    assert answer is not None and answer.too_many


def test_ranks_that_went_on_do_not_fit() -> None:
    def program(job: Job, rank: int) -> object:
        for _ in range(3):
            yield all_reduce(job.world, 8, line=10)
        if rank == 3:
            yield Stay(57, "load_batch")
        yield all_reduce(job.world, 8, line=10)

    logs = Job(4).run(program).logs()
    keys = [state_key(log) for log in logs]
    assert keys[0] is not None and keys == [keys[0]] * 3 + [None]
    states = States({keys[0]: 0b111}, alone=0b1000)
    assert fit(states, logs)
    logs[1].issued += 1
    logs[1].collectives[-1].index += 1
    assert not fit(states, logs)


def test_a_process_that_does_not_know_its_rank_is_in_no_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def program(job: Job, rank: int) -> object:
        yield all_reduce(job.world, 8, line=10)
        yield Stay(57, "load_batch") if rank else all_reduce(job.world, 8, line=11)

    log = Job(2).run(program).logs()[0]
    log.rank = -1
    assert state_key(log) is not None and pose_key(log) is not None
    monkeypatch.setattr(module, "newest_records", lambda status, records: records)
    box = SimpleNamespace(log=lambda newest: log, status=lambda: None)
    member = SimpleNamespace(rank=-1, pid=4, box=box, status=object())
    states = module.states_of([member], {4: log.observation}, None)  # type: ignore[list-item]
    assert states == States({}), "rank 0 is another process"


def test_ranks_of_a_mask() -> None:
    assert ranks_in(0) == set()
    assert ranks_in(1 << 17 | 1) == {0, 17}
