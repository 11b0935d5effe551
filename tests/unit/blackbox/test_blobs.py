"""Arguments and stacks beside the records."""

from __future__ import annotations

import pytest
from boxes import Box

from commlens.blackbox.reader import read_box


class TestBlobs:
    def box(self, **lost: int) -> Box:
        box = Box()
        good = {
            "group": box.group(),
            "asked": box.asked(),
            "stack": box.stack(("/home/me/a.py", 1, "f")),
        }
        box.record(**(good | lost))
        return box

    @pytest.mark.parametrize("position", [5, 1 << 40, 8, 0])
    def test_without_its_group_a_record_is_lost(self, position: int) -> None:
        log = read_box(self.box(group=position).bytes())
        assert log.collectives == []
        assert log.problems == [
            "1 of the last 1 records are left out because their group was overwritten or is damaged"
        ]

    def test_without_what_was_asked_a_record_keeps_its_place(self) -> None:
        log = read_box(self.box(asked=1 << 40).bytes())
        assert [(got.op, got.sequence_number) for got in log.collectives] == [("unknown", 1)]
        assert log.problems == [
            "1 of the last 1 records are without their arguments, which were overwritten or are"
            " damaged"
        ]

    def test_without_it_a_send_cannot_be_told_from_a_receive(self) -> None:
        box = Box()
        group = box.group()
        box.record(group=group, asked=0, peer=2)
        box.record(group=group, asked=0, flags=8 | 16)
        log = read_box(box.bytes())
        assert [(got.index, got.op) for got in log.collectives] == [(2, "recv")]

    def test_without_its_stack(self) -> None:
        log = read_box(self.box(stack=1 << 40).bytes())
        assert log.collectives[0].stack == ()
        assert log.problems == [
            "1 of the last 1 records are without their stacks, which were overwritten or are"
            " damaged"
        ]

    def test_a_blob_of_another_kind(self) -> None:
        box = Box()
        group, asked = box.group(), box.asked()
        box.record(group=asked, asked=group)
        assert read_box(box.bytes()).collectives == []

    def test_the_table_wraps_and_old_blobs_die(self) -> None:
        box = Box()
        old = box.stack(("/home/me/old.py", 1, "f"))
        while box.head < box.side_size + 4096:
            box.text("x" * 30_000)
        box.record(group=box.group(), asked=box.asked(), stack=old)
        log = read_box(box.bytes())
        assert (log.collectives[0].op, log.collectives[0].stack) == ("all_reduce", ())

    def test_an_old_blob_that_nothing_has_overwritten_yet_is_dead_all_the_same(self) -> None:
        box = self.box()
        box.word(280, box.head + box.side_size)
        assert read_box(box.bytes()).collectives == []

    @pytest.mark.parametrize(
        "change",
        [
            {"in": 3},
            {"in": [[["5"], "float32"]]},
            {"in": [[[-5], "float32"]]},
            {"in": [[[1 << 70], "f"]]},
            {"in": [[[5]]]},
            {"op": None},
            {"root": "two"},
            {"is": [1.5]},
            {"async": 1},
            {"k": "stack"},
            {"k": 7},
        ],
    )
    def test_json_of_wrong_shape_is_a_problem_and_no_exception(
        self, change: dict[str, object]
    ) -> None:
        box = Box()
        box.record(group=box.group(), asked=box.asked(**change))  # type: ignore[arg-type]
        log = read_box(box.bytes())
        assert log.collectives[0].op == "unknown"
        assert len(log.problems) == 1

    @pytest.mark.parametrize(
        "raw",
        [
            b"",
            b"null",
            b"[" * 60_000,
            b'{"k":',
            b'"\xff"',
            b'{"k":"stack","f":[["\\ud800",1,"f"]]}',
        ],
    )
    def test_json_that_is_none(self, raw: bytes) -> None:
        box = Box()
        box.record(group=box.group(), asked=box.asked(), stack=box.blob(None, raw=raw))
        assert read_box(box.bytes()).collectives[0].stack == ()

    @pytest.mark.parametrize("ranks", ["", "x", "3-1", "0-99999999999", "-1", "0-3:0"])
    def test_a_group_without_ranks_is_none(self, ranks: str) -> None:
        box = Box()
        box.record(group=box.group(ranks=ranks), asked=box.asked())
        assert read_box(box.bytes()).collectives == []
