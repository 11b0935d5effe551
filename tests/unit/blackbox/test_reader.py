"""What a valid black box says is what its reader gives; each rule of docs/protocol.md has its
example here.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

import boxes
import pytest
from boxes import COMMLENS, MONO, STDLIB, TORCH, UNIX, Box, busy_box

from commlens.blackbox import layout as L
from commlens.blackbox.reader import OpenBox, read_box, read_status
from commlens.errors import FormatError
from commlens.model.collective import Collective, FrameKind, LearnedHow, State
from commlens.model.refusal import Refusal


def one(box: Box) -> Collective:
    """The only collective of a box that has nothing wrong with it."""
    log = read_box(box.bytes())
    assert log.problems == []
    assert len(log.collectives) == 1
    return log.collectives[0]


class TestWhoAndWhat:
    def test_the_process(self) -> None:
        box = Box(
            2,
            8,
            pid=99,
            job="j7",
            host="n03",
            local_rank=2,
            about={"restart": 1},
        )
        box.word(296, 41)
        box.heartbeat(MONO + 5_000_000_000)
        log = read_box(box.bytes(), name="x.box", captured_ns=123)
        assert (log.rank, log.world_size, log.pid, log.local_rank, log.restart) == (2, 8, 99, 2, 1)
        assert (log.job, log.host, log.script, log.timeout_s) == ("j7", "n03", "train.py", 1800.0)
        assert log.versions == {"commlens": "0.1.0", "torch": "2.13.0", "python": "3.11.9"}
        assert (log.steps, log.heartbeat_ns, log.captured_ns) == (41, UNIX + 5_000_000_000, 123)
        assert (log.initialised, log.closed, log.exception, log.source) == (
            True,
            False,
            None,
            "x.box",
        )
        assert (log.collectives, log.issued, log.problems) == ([], 0, [])

    def test_a_rank_that_makes_a_new_default_group_has_not_left(self) -> None:
        box = busy_box(3, 4)
        box.word(L.PHASE, L.PHASE_LEFT)
        assert read_status(box.bytes()[:4096]).left
        box.word(L.SETUP_SINCE, MONO + 9_000_000)
        assert not read_status(box.bytes()[:4096]).left
        box.word(L.SETUP_SINCE, L.SETUP_RAISED)
        assert read_status(box.bytes()[:4096]).left

    def test_status_without_reading_the_records(self) -> None:
        box = busy_box(3, 4)
        box.word(304, 10)
        box.word(312, MONO + 10_000_000)
        box.word(352, MONO + 7)
        status = read_status(box.bytes()[:4096])
        assert (status.rank, status.world_size, status.pid, status.start_ticks, status.job) == (
            3,
            4,
            4121,
            777,
            "job-1",
        )
        assert (status.boot_id, status.pid_namespace, status.capacity, status.local_rank) == (
            "b007",
            "4026531836",
            16,
            None,
        )
        assert (status.issued, status.steps, status.oldest_index, status.oldest_mono_ns) == (
            10,
            5,
            10,
            MONO + 10_000_000,
        )
        assert (
            status.main_stack_since_mono_ns,
            status.evidence_number,
            status.initialised,
            status.closed,
        ) == (MONO + 7, 1, True, False)

    @pytest.mark.parametrize(
        ("phase", "initialised", "closed", "exception"),
        [
            (0, False, False, None),
            (1, True, False, None),
            (2, True, True, None),
            (3, True, True, "a non-zero exit status"),
            (4, False, True, None),
            (5, False, True, "a non-zero exit status"),
            (6, True, False, None),
            (7, False, False, None),
        ],
    )
    def test_phases(
        self, phase: int, initialised: bool, closed: bool, exception: str | None
    ) -> None:
        box = Box()
        box.word(288, phase)
        log = read_box(box.bytes())
        assert (log.initialised, log.closed, log.exception) == (initialised, closed, exception)

    def test_calls_that_make_groups(self) -> None:
        box = Box()
        note = {
            "k": "setup",
            "op": "init_process_group",
            "name": "default_pg",
            "ranks": "0-3",
            "label": "tcp://n03:29500",
            "began": MONO + 5,
        }
        first = box.blob(note | {"began": MONO + 5})
        stack = box.stack(("/home/me/train.py", 12, "build"))
        newest = box.blob(
            note
            | {
                "op": "new_group",
                "name": "1",
                "ranks": "0,2",
                "stack": stack,
                "began": MONO + 9,
                "prev": first,
            }
        )
        box.word(376, newest)
        box.word(384, MONO + 9)
        status = read_status(box.bytes()[:4096])
        assert status.in_setup and status.setup_since_mono_ns == MONO + 9
        init, group = read_box(box.bytes()).setups
        assert (init.op, init.state, init.module) == (
            "init_process_group",
            State.COMPLETED,
            "tcp://n03:29500",
        )
        assert (group.op, group.state, group.channel.group.ranks, group.announced_ns) == (
            "new_group",
            State.ISSUED,
            (0, 2),
            UNIX + 9,
        )
        assert group.source is not None and group.source.line == 12
        for ended, state in ((0, State.COMPLETED), (1, State.FAILED)):
            box.word(384, ended)
            assert read_box(box.bytes()).setups[-1].state is state
            assert not read_status(box.bytes()[:4096]).in_setup
        box.word(376, box.blob(note | {"prev": 1 << 40}))
        assert len(read_box(box.bytes()).setups) == 1, "the older ones are overwritten"

    def test_rank_learnt_after_creation(self) -> None:
        box = Box(-1, 0)
        box.word(360, 6 << 32 | 8)
        log = read_box(box.bytes())
        assert (log.rank, log.world_size) == (5, 8)

    def test_nonsense_in_the_late_rank_is_not_believed(self) -> None:
        box = Box(1, 4)
        box.word(360, 9 << 32 | 8)
        assert read_box(box.bytes()).rank == 1

    def test_uncaught_exception_and_open_expect_slow(self) -> None:
        box = Box()
        content = {
            "k": "exception",
            "text": "\nValueError: bad batch\nmore",
            "f": [["/home/me/train.py", 61, "step"]],
            "assertion": "Loss.cu:245, loss: t < n",
        }
        box.word(344, box.blob(content))
        box.word(336, box.text("checkpoint"))
        log = read_box(box.bytes())
        assert (log.exception, log.expecting, log.closed) == (
            "ValueError: bad batch",
            "checkpoint",
            False,
        )
        assert [frame.where for frame in log.exception_stack] == ["train.py:61"]
        assert log.device_assertion == "Loss.cu:245, loss: t < n"

    def test_a_refusal_by_an_earlier_version_is_read_without_its_table(self) -> None:
        refusal = {"kind": "mismatch/shape", "reason": "shape mismatches"}
        table = ["Input shapes of x:", "Process 0: [2]  float32   train.py:21 in main"]
        content = {"k": "exception", "text": "refused", "refusal": refusal | {"table": table}}
        box = Box()
        box.word(344, box.blob(content))
        assert read_box(box.bytes()).refusal == Refusal(**refusal)

    def test_about_text_of_wrong_types_is_survived(self) -> None:
        box = Box(
            about={
                "job": ["x"],
                "restart": "two",
                "prefixes": 3,
                "torch": {},
                "boot_id": 4,
            }
        )
        log = read_box(box.bytes())
        assert (log.job, log.restart) == ("", 0)
        box.write_header(b"[1, 2]")
        assert read_box(box.bytes()).problems == [
            "the text about the process (job, host, script) is damaged"
        ]


class TestRecords:
    def test_every_field(self) -> None:
        box = Box()
        group = box.group(
            "7", "0-2,8", desc="tp_group", device="cuda", inc=2, mesh_dim="tp", backend="nccl"
        )
        content = {
            "in": [[[4, 5], "bfloat16", "cuda", "strided", [1, 0]]],
            "out": [[[20], "bfloat16", "cuda", "strided", None]],
        }
        asked = box.asked(
            "reduce_scatter",
            "_reduce_scatter_base_",
            rop="AVG",
            root=8,
            **content,
            **{"is": [1, 2], "os": [3], "async": True},
        )
        stack = box.stack(("/home/me/train.py", 57, "load_batch"))
        module = box.text("FSDP::all_gather (layers.0)")
        index = box.record(
            group=group,
            asked=asked,
            stack=stack,
            module=module,
            seq=5,
            step=41,
            coalescing_id=9,
            tag=-3,
            thread=77,
            flags=8 | 4 | 2,
            members=6,
        )
        box.complete(index, waiter=78)
        box.value(index, boxes.DURATION, 1234)
        got = one(box)
        assert (
            got.index,
            got.sequence_number,
            got.step,
            got.coalescing_id,
            got.coalesced_members,
        ) == (1, 5, 41, 9, 6)
        assert (got.tag, got.peer, got.issue_thread, got.wait_thread, got.concurrent) == (
            -3,
            None,
            77,
            78,
            True,
        )
        assert got.channel.key == (2, "7", (0, 1, 2, 8), "cuda")
        assert (
            got.channel.group.label,
            got.channel.group.description,
            got.channel.group.backend,
        ) == ("tp", "tp_group", "nccl")
        assert (got.args.op, got.args.dispatcher_op, got.args.reduce_op, got.args.root) == (
            "reduce_scatter",
            "_reduce_scatter_base_",
            "AVG",
            8,
        )
        assert (got.args.input_splits, got.args.output_splits, got.args.asynchronous) == (
            (1, 2),
            (3,),
            True,
        )
        assert got.args.inputs[0].shape == (4, 5)
        assert got.args.inputs[0].memory_order == (1, 0)
        assert got.args.outputs[0].shape == (20,)
        assert got.source is not None
        assert got.source.where == "train.py:57"
        assert (got.module, got.duration_ns, got.state, got.learned_how) == (
            "FSDP::all_gather (layers.0)",
            123_400,
            State.COMPLETED,
            LearnedHow.WAIT,
        )

    def test_times_become_unix_times(self) -> None:
        box = Box()
        index = box.record(group=box.group(), asked=box.asked(), at=MONO + 1_000)
        for word, moment in zip(
            (boxes.RETURNED, boxes.WAIT_BEGAN, boxes.WAIT_ENDED, boxes.DONE),
            (2, 3, 4, 5),
            strict=True,
        ):
            box.mark(index, word, MONO + moment * 1_000)
        got = one(box)
        assert (got.announced_ns, got.entered_ns) == (UNIX + 1_000, UNIX + 1_000)
        assert (got.returned_ns, got.wait_began_ns, got.wait_ended_ns, got.done_ns) == tuple(
            UNIX + k * 1_000 for k in (2, 3, 4, 5)
        )

    def test_the_heartbeat_corrects_the_wall_clock(self) -> None:
        box = Box()
        box.record(group=box.group(), asked=box.asked(), at=MONO + 1_000)
        # the clock was set a quarter of a second on
        box.heartbeat(MONO + 10**9, UNIX + 10**9 + 250_000_000)
        assert one(box).announced_ns == UNIX + 1_000 + 250_000_000
        box.heartbeat(MONO + 10**9, UNIX + (1 << 60))  # no clock is: this is damage
        assert one(box).announced_ns == UNIX + 1_000

    @pytest.mark.parametrize(
        ("flags", "entered", "outcome", "how", "state", "learned"),
        [
            (0, False, 0, 0, State.ANNOUNCED, LearnedHow.NOT_YET),
            (0, True, 0, 0, State.ISSUED, LearnedHow.NOT_YET),
            (8, False, 0, 0, State.ISSUED, LearnedHow.NOT_YET),
            (8, False, 1, 1, State.COMPLETED, LearnedHow.RETURN),
            (8, False, 1, 3, State.COMPLETED, LearnedHow.POLL),
            (8, False, 1, 4, State.COMPLETED, LearnedHow.NATIVE_RECORDER),
            (8, False, 2, 2, State.FAILED, LearnedHow.WAIT),
            (8, False, 3, 5, State.UNKNOWN, LearnedHow.UNKNOWN),
            # no such codes: nothing is claimed
            (8, False, 77, 99, State.UNKNOWN, LearnedHow.UNKNOWN),
        ],
    )
    def test_states(
        self, flags: int, entered: bool, outcome: int, how: int, state: State, learned: LearnedHow
    ) -> None:
        box = Box()
        index = box.record(group=box.group(), asked=box.asked(), flags=flags)
        if entered:
            box.mark(index, boxes.ENTERED, MONO + 2_000_000)
        box.outcome(index, outcome, how)
        got = one(box)
        assert (got.state, got.learned_how) == (state, learned)
        assert got.in_flight == (state in (State.ANNOUNCED, State.ISSUED))

    def test_a_thread_that_waits(self) -> None:
        box = Box()
        index = box.record(group=box.group(), asked=box.asked())
        box.mark(index, boxes.WAIT_BEGAN, MONO + 3_000_000)
        box.outcome(index, 0, 0, waiter=4125)
        got = one(box)
        assert got.waited_for
        assert got.wait_thread == 4125

    def test_the_error_of_a_failed_one(self) -> None:
        box = Box()
        index = box.record(group=box.group(), asked=box.asked())
        box.outcome(index, boxes.FAILED, boxes.BY_WAIT)
        box.value(index, boxes.FAILURE, box.text("connection closed by peer"))
        assert one(box).error == "connection closed by peer"

    def test_the_reduce_op_that_was_filled_in_later(self) -> None:
        box = Box()
        group, asked = box.group(), box.asked()
        for code in range(12):
            box.value(box.record(group=group, asked=asked, seq=code + 1), boxes.REDUCE_OP, code)
        ops = [got.args.reduce_op for got in read_box(box.bytes()).collectives]
        assert ops == [
            None,
            "SUM",
            "AVG",
            "PRODUCT",
            "MIN",
            "MAX",
            "BAND",
            "BOR",
            "BXOR",
            "PREMUL_SUM",
            "UNUSED",
            None,
        ]

    def test_point_to_point(self) -> None:
        box = Box()
        group = box.group()
        box.record(group=group, asked=box.asked("send", "send"), peer=0, tag=12)
        box.record(group=group, asked=box.asked("recv", "recv_any_source_"), flags=8 | 16)
        send, receive = read_box(box.bytes()).collectives
        assert (send.is_point_to_point, send.peer, send.tag) == (True, 0, 12)
        assert (receive.is_point_to_point, receive.peer) == (True, None)

    def test_records_share_what_is_equal(self) -> None:
        box = busy_box()
        stored_again = box.record(group=box.group(), asked=box.asked(), seq=99)
        log = read_box(box.bytes())
        assert log.collectives[-1].index == stored_again
        assert len({id(got.args) for got in log.collectives}) == 1
        assert len({id(got.channel) for got in log.collectives}) == 1

    @pytest.mark.parametrize("word", [*range(120, 192, 8)])
    def test_a_word_left_by_the_slots_former_record_is_absent(self, word: int) -> None:
        box = Box(capacity=4)
        group, asked = box.group(), box.asked()
        for number in range(1, 6):
            index = box.record(group=group, asked=asked, seq=number, flags=0)
            if number == 1:  # the fifth record takes its slot
                stale = 3 << 8 | 5 if word == boxes.OUTCOME else 2
                box.value(index, word, stale)
        got = read_box(box.bytes()).collectives[-1]
        fresh = Collective(
            5, got.channel, 5, got.args, State.ANNOUNCED, UNIX + 5_000_000, issue_thread=4121
        )
        assert got == fresh

    def test_a_time_before_the_announcement_is_absent_though_the_tag_is_right(self) -> None:
        """65536 records later the same tag comes back."""
        box = Box(capacity=4)
        index = box.record(
            group=box.group(), asked=box.asked(), index=65_537, at=MONO + 5_000_000_000
        )
        box.mark(index, boxes.WAIT_BEGAN, MONO + 1_000)
        assert read_box(box.bytes()).collectives[0].wait_began_ns == 0


class TestRing:
    def test_a_wrapped_ring_starts_late(self) -> None:
        log = read_box(busy_box(records=40).bytes())
        assert [got.index for got in log.collectives] == [*range(25, 41)]
        assert (log.issued, log.problems) == (40, [])

    def test_a_torn_record_is_left_out_and_counted(self) -> None:
        box = busy_box()
        box.data[box.slot(4) + 50] ^= 1
        box.data[box.slot(7) + 98] ^= 1
        log = read_box(box.bytes())
        assert [got.index for got in log.collectives] == [1, 2, 3, 5, 6, 8, 9, 10]
        assert log.problems == ["2 of the last 10 records are torn or damaged and left out"]
        assert log.issued == 10

    def test_a_record_in_a_slot_that_is_not_its_own(self) -> None:
        box = busy_box()
        at, to = box.slot(3), box.slot(4)
        box.data[to : to + 192] = box.data[at : at + 192]
        log = read_box(box.bytes())
        assert [got.index for got in log.collectives] == [1, 2, 3, 5, 6, 7, 8, 9, 10]
        assert log.problems == ["1 of the last 10 records are torn or damaged and left out"]

    def test_what_was_overwritten_while_it_was_copied_is_not_in_the_box_any_more(self) -> None:
        box = Box(capacity=4)
        group, asked = box.group(), box.asked()
        for index in (1, 2, 7, 8, 9):  # 2 was copied before the writer came round and wrote 6
            box.record(group=group, asked=asked, index=index)
        log = read_box(box.bytes())
        assert [got.index for got in log.collectives] == [7, 8, 9]
        assert log.issued == 9

    def test_the_counter_may_be_behind_the_ring_and_is_not_believed_far_ahead(self) -> None:
        box = busy_box()
        box.word(272, 8)
        assert read_box(box.bytes()).issued == 10
        box.word(272, 10_000)
        log = read_box(box.bytes())
        assert (log.issued, log.problems) == (10, ["the count of collectives is damaged"])

    def test_records_lost_to_an_error_of_ours_are_said(self) -> None:
        box = busy_box()
        box.word(320, 3)
        assert read_box(box.bytes()).problems == [
            "3 collectives were not recorded because of an error inside commlens"
        ]


class TestFrames:
    @pytest.mark.parametrize(
        ("file", "kind"),
        [
            ("/home/me/train.py", FrameKind.USER),
            (f"{TORCH}/nn/modules/module.py", FrameKind.TORCH),
            # not torch, though its folder's name begins so
            (f"{TORCH}vision/transforms.py", FrameKind.LIBRARY),
            (f"{STDLIB}/site-packages/transformers/trainer.py", FrameKind.LIBRARY),
            ("/other/env/lib/python3.12/dist-packages/x/y.py", FrameKind.LIBRARY),
            (f"{STDLIB}/threading.py", FrameKind.PYTHON),
            ("<frozen runpy>", FrameKind.PYTHON),
            ("<string>", FrameKind.USER),
            ("/other/lib/python3.12/threading.py", FrameKind.PYTHON),
            ("/other/lib/python3.12/site-packages/torch/nn/x.py", FrameKind.TORCH),
            ("<eval_with_key>.7", FrameKind.TORCH),
            (f"{COMMLENS}/capture/tap.py", FrameKind.COMMLENS),
            (f"{COMMLENS}/scenarios/programs/ddp.py", FrameKind.USER),
        ],
    )
    def test_whose_code(self, file: str, kind: FrameKind) -> None:
        box = Box()
        box.record(group=box.group(), asked=box.asked(), stack=box.stack((file, 3, "f")))
        assert one(box).stack[0].kind is kind

    def test_native_frames_are_marked(self) -> None:
        box = Box()
        box.record(
            group=box.group(),
            asked=box.asked(),
            stack=box.stack(("libtorch_cpu.so", None, "c10d::Reducer", "n"), ("/a.py", 1, "f")),
        )
        native, python = one(box).stack
        assert (native.kind, native.line, python.kind) == (FrameKind.NATIVE, 0, FrameKind.USER)

    def test_the_watcher_sorts_its_own_stacks_alike(self, tmp_path: Path) -> None:
        with OpenBox(Box().write(tmp_path)) as box:
            kind_of = box.classifier()
        assert (kind_of(f"{TORCH}/a.py"), kind_of("/home/me/a.py")) == (
            FrameKind.TORCH,
            FrameKind.USER,
        )


class TestEvidence:
    def thread(self, line: int) -> list[dict[str, object]]:
        return [
            {
                "tid": 4121,
                "name": "MainThread",
                "main": True,
                "f": [["/home/me/train.py", line, "load_batch"]],
            },
            {"tid": 4130, "name": "pt_autograd_0", "main": False, "f": [[f"{TORCH}/x.py", 1, "g"]]},
        ]

    def test_the_newer_slot_is_taken(self) -> None:
        box = Box()
        for number in (1, 2, 3):
            box.evidence(self.thread(number), MONO + number * 1_000)
        log = read_box(box.bytes())
        assert [(s.thread, s.name, s.is_main, s.taken_ns) for s in log.stacks] == [
            (4121, "MainThread", True, UNIX + 3_000),
            (4130, "pt_autograd_0", False, UNIX + 3_000),
        ]
        assert log.main_stack is not None
        assert log.main_stack.frames[0].where == "train.py:3"
        assert log.stacks_ns == UNIX + 3_000

    def test_one_that_is_being_written_gives_way_to_the_former(self) -> None:
        box = Box()
        box.evidence(self.thread(1))
        box.evidence(self.thread(2))
        box.data[box.evidence_at + 40] ^= 1
        log = read_box(box.bytes())
        assert log.main_stack is not None
        assert log.main_stack.frames[0].line == 1
        assert log.problems == []

    @pytest.mark.parametrize(
        "raw", [b"{}x", b'{"threads": 3}', b'{"threads": [{"tid": -1}]}', b"[" * 100_000]
    )
    def test_what_cannot_be_read_is_said(self, raw: bytes) -> None:
        box = Box()
        box.evidence([], raw=raw)
        log = read_box(box.bytes())
        assert (log.stacks, log.problems) == ([], ["the threads' stacks could not be read"])


class TestRefused:
    def refused(self, content: bytes) -> str:
        with pytest.raises(FormatError) as error:
            read_box(content, name="x.box")
        return str(error.value)

    def test_sentences(self) -> None:
        box = busy_box()
        assert self.refused(b"") == "x.box is empty."
        assert self.refused(b"PK\x03\x04 something else") == "x.box is not a commlens black box."
        assert self.refused(bytes(8192)) == "x.box has not been written yet."
        assert (
            self.refused(box.bytes()[:3])
            == "x.box is cut off within its header: 3 of 4096 bytes are left."
        )
        assert (
            self.refused(box.bytes()[:4095])
            == "x.box is cut off within its header: 4095 of 4096 bytes are left."
        )
        box.data[30] ^= 1
        assert (
            self.refused(box.bytes()) == "x.box has a damaged header: its checksum does not match."
        )
        box.write_header(version=2)
        assert "layout version 2, but this commlens reads version 1" in self.refused(box.bytes())

    @pytest.mark.parametrize(
        "field",
        [
            "header",
            "record",
            "capacity",
            "side_at",
            "side_size",
            "evidence_at",
            "evidence_slot",
            "total",
            "world_size",
        ],
    )
    @pytest.mark.parametrize("value", [0, 1, 1 << 31])
    def test_sizes_that_contradict_each_other(self, field: str, value: int) -> None:
        if (field == "world_size" and value < 2) or (field, value) in (
            ("capacity", 1),
            ("side_size", 1),
        ):
            return  # legal, if odd
        box = busy_box()
        box.write_header(**{field: value})
        assert "contradict each other" in self.refused(box.bytes())

    def test_a_file_cut_short_gives_what_is_left(self) -> None:
        box = busy_box()
        log = read_box(box.bytes()[: box.side_at + box.head])
        assert len(log.collectives) == 10
        assert (
            log.problems[0]
            == f"the file is cut off: {box.side_at + box.head} of {box.total} bytes are left"
        )
        cut = 4096 + 3 * 192 + 50
        log = read_box(box.bytes()[:cut])
        assert log.collectives == []
        assert log.issued == 10
        assert log.problems[0] == f"the file is cut off: {cut} of {box.total} bytes are left"


class TestOpenBox:
    def test_a_box_that_is_deleted_or_replaced_stays_readable(self, tmp_path: Path) -> None:
        path = busy_box().write(tmp_path)
        with OpenBox(path) as box:
            path.unlink()
            path.write_bytes(b"something else")
            assert box.status().issued == 10
            assert len(box.log().collectives) == 10
            assert read_box(box.packed()).collectives == read_box(busy_box().bytes()).collectives

    def test_what_never_changes_in_a_header_is_not_read_again(self, tmp_path: Path) -> None:
        path = Box(3).write(tmp_path)
        with OpenBox(path) as box:
            before = box.status()
            with path.open("r+b") as file:
                file.write(bytes(200))
                file.seek(2048)
                file.write(bytes(100))
            assert box.status() == before
            assert (box.log().problems, read_box(box.packed()).rank) == ([], 3)

    def test_a_box_that_is_cut_short_under_it(self, tmp_path: Path) -> None:
        path = busy_box().write(tmp_path)
        with OpenBox(path) as box:
            assert box.status().issued == 10
            os.truncate(path, 10_000)
            assert box.status().issued == 10
            assert box.log().problems[0].startswith("the file is cut off: 10000 of")
            assert read_box(box.packed()).problems[0].startswith("the file is cut off: 10000 of")
            os.truncate(path, 100)
            with pytest.raises(FormatError, match="was cut off while it was read"):
                box.status()
            with pytest.raises(FormatError, match="cut off within its header"):
                box.log()

    def test_a_live_word_is_seen_at_the_next_poll(self, tmp_path: Path) -> None:
        path = busy_box().write(tmp_path)
        with OpenBox(path) as box, path.open("r+b") as file:
            assert not box.status().closed
            file.seek(288)
            file.write(struct.pack("<Q", 2))
            file.flush()
            assert box.status().closed

    def test_only_regular_files_are_opened(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe.box")
        for path in (tmp_path, tmp_path / "pipe.box", Path("/dev/null")):
            with pytest.raises(FormatError, match="is not a regular file"):
                OpenBox(path)
        with pytest.raises(
            FormatError, match=r"gone\.box could not be opened: no such file or directory\."
        ):
            read_box(tmp_path / "gone.box")
        with pytest.raises(FormatError, match="could not be opened"):
            OpenBox(Path("nul\0byte"))


def test_a_wait_to_write_into_a_full_queue_blocks_a_process() -> None:
    box = busy_box(3, 4)
    assert read_status(box.bytes()[:4096]).blocked_since_mono_ns == 0
    box.word(L.SETUP_SINCE, MONO + 9)
    assert read_status(box.bytes()[:4096]).blocked_since_mono_ns == MONO + 9
    box.word(L.QUEUE_SINCE, MONO + 7)
    assert read_status(box.bytes()[:4096]).blocked_since_mono_ns == MONO + 7
