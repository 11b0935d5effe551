"""Dumps are saved whole, read in any order, and only what commlens made is deleted."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import shutil
import threading
from pathlib import Path

import pytest
from boxes import MONO, UNIX, Box, busy_box
from chosen import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from live_jobs import SEEN, live_job, open_folder, ranks_of, run_code, unprivileged

from commlens.blackbox import job_dirs
from commlens.blackbox.reader import OpenBox, read_box
from commlens.dumps.detect import MARKER
from commlens.dumps.read import read_evidence
from commlens.dumps.save import SavedRank, add_node, discard_job, dump_name, holds, save_dump
from commlens.errors import CommandError
from commlens.model.health import HealthEvent, NodeHealth, RankPlace
from commlens.model.ranklog import Observation


class TestRoundTrip:
    def test_what_is_saved_is_what_is_read(self, tmp_path: Path) -> None:
        job_dir = live_job(tmp_path)
        saved = save_dump(job_dir, tmp_path / "dumps", {2: SEEN}, host="n03", keep=10)
        assert saved == tmp_path / "dumps" / dump_name([job_dir])
        assert re.fullmatch(r"train-\d{8}-\d{6}-1", saved.name), "its script, its start, its job"
        assert sorted(path.name for path in saved.iterdir()) == [
            MARKER,
            "observed-n03.json",
            *(f"rank{rank}.{100 + rank}.box" for rank in range(4)),
        ]
        for path in job_dirs.boxes(job_dir):
            assert read_box(saved / path.name, name="box", captured_ns=1) == read_box(
                path, name="box", captured_ns=1
            )
            assert (saved / path.name).stat().st_size < 4000
        evidence = read_evidence([saved])
        assert (evidence.problems, evidence.job, evidence.other_jobs) == ([], "job-1", [])
        assert ranks_of(evidence) == [0, 1, 2, 3]
        assert evidence.logs[2].observation == SEEN
        assert evidence.logs[1].observation == Observation()
        assert [got.index for got in evidence.logs[3].collectives] == [*range(1, 11)]

    def test_a_log_is_dated_by_its_copying(self, tmp_path: Path) -> None:
        saved = save_dump(live_job(tmp_path), tmp_path / "dumps", {}, host="n03", keep=10)
        for path in saved.glob("*.box"):
            os.utime(path, (0, 0))
        moments = json.loads((saved / "observed-n03.json").read_text())["saved"]
        assert [log.captured_ns for log in read_evidence([saved]).logs] == [
            moments[name] for name in sorted(moments)
        ]

    def test_without_a_date_it_is_the_jobs_last_sign_of_life(self, tmp_path: Path) -> None:
        late = busy_box(1)
        late.heartbeat(MONO + 77_000_000_000)
        late.write(tmp_path)
        busy_box(0).write(tmp_path)
        assert [log.captured_ns for log in read_evidence([tmp_path]).logs] == [
            UNIX + 77_000_000_000
        ] * 2

    def test_saving_again_overwrites(self, tmp_path: Path) -> None:
        job_dir = live_job(tmp_path)
        save_dump(job_dir, tmp_path / "dumps", {}, host="n03", keep=10)
        busy_box(0, 4, pid=100, records=12).write(job_dir)
        saved = save_dump(job_dir, tmp_path / "dumps", {0: SEEN}, host="n03", keep=10)
        evidence = read_evidence([saved])
        assert (evidence.problems, evidence.logs[0].issued, evidence.logs[0].observation) == (
            [],
            12,
            SEEN,
        )

    def test_another_run_of_the_same_name_never_overwrites(self, tmp_path: Path) -> None:
        """One id of a rendezvous used twice, in one second and later; the nodes of a run save into
        one folder.
        """
        saved = []
        for run, began_s in enumerate((0, 0.5, 3600)):
            for node in ("n1", "n2"):
                job_dir = tmp_path / f"{run}{node}" / "train_7"
                box = busy_box(0, pid=100, job="train_7")
                box.write_header(unix=UNIX + int((began_s + (node == "n2") * 2) * 1e9))
                box.write(job_dir)
                saved += [
                    save_dump(job_dir, tmp_path / "dumps", {}, host=f"{node}", keep=10)
                    for _ in range(2)
                ]
        assert [saved.index(each) for each in saved] == [0] * 4 + [4] * 4 + [8] * 4
        assert all(len(list(each.glob("*.box"))) == 1 for each in saved)

    def test_a_job_whose_boxes_lie_in_two_folders(self, tmp_path: Path) -> None:
        for rank, root in enumerate(("shm", "run", "shm", "run")):
            busy_box(rank, pid=100 + rank).write(tmp_path / root / "commlens-0" / "job-1")
        folders = [tmp_path / root / "commlens-0" / "job-1" for root in ("shm", "run")]
        for folder in folders:
            saved = save_dump(
                folder,
                tmp_path / "dumps",
                dict.fromkeys(range(4), SEEN),
                host="n03",
                keep=10,
                folders=folders,
            )
        evidence = read_evidence([saved])
        assert (ranks_of(evidence), evidence.problems) == ([0, 1, 2, 3], [])
        observed = json.loads((saved / "observed-n03.json").read_text())
        assert [observed["ranks"][str(rank)]["pid"] for rank in range(4)] == [100, 101, 102, 103]
        assert sorted(observed["saved"]) == [f"rank{rank}.{100 + rank}.box" for rank in range(4)]

    def test_several_hosts_save_into_one_folder(self, tmp_path: Path) -> None:
        for host, ranks in (("n1", (0, 1)), ("n2", (2, 3))):
            job_dir = tmp_path / host / "commlens-0" / "job-1"
            for rank in ranks:
                busy_box(rank).write(job_dir)
            save_dump(job_dir, tmp_path / "dumps", dict.fromkeys(ranks, SEEN), host=host, keep=10)
        evidence = read_evidence([tmp_path / "dumps"])
        assert (ranks_of(evidence), evidence.problems) == ([0, 1, 2, 3], [])
        assert all(log.observation == SEEN for log in evidence.logs)

    def test_a_rank_that_died_before_it_had_a_box(self, tmp_path: Path) -> None:
        saved = save_dump(
            live_job(tmp_path, 2),
            tmp_path / "dumps",
            {1: SEEN, 2: SEEN, 3: Observation()},
            host="n03",
            keep=10,
        )
        evidence = read_evidence([saved])
        assert ranks_of(evidence) == [0, 1, 2]
        assert (evidence.logs[2].observation, evidence.logs[2].collectives) == (SEEN, [])
        assert evidence.problems == [
            "There is no black box of rank 2, only outside observations of the process."
        ]

    def test_what_was_observed_of_another_process_is_not_joined(self, tmp_path: Path) -> None:
        saved = save_dump(live_job(tmp_path), tmp_path / "dumps", {2: SEEN}, host="n03", keep=10)
        (saved / "rank2.102.box").unlink()
        busy_box(2, pid=999).write(saved)
        assert read_evidence([saved]).logs[2].observation == Observation()


class TestSharedFolder:
    """The node that reports adds another node's ranks to its dump, which that node may save there,
    too.
    """

    def nodes(self, folder: Path, *, theirs: str = "job-1", restart: int = 0) -> tuple[Path, Path]:
        """Two ranks on each of two nodes; the first one has restarted its workers."""
        jobs = []
        for number, job in ((0, "job-1"), (1, theirs)):
            jobs.append(folder / f"box{number}" / "commlens-0" / job)
            for rank in (2 * number, 2 * number + 1):
                about = {"restart": 0 if number else restart}
                busy_box(rank, job=job, pid=100 + rank, host=f"n{number}", about=about).write(
                    jobs[-1]
                )
        return jobs[0], jobs[1]

    def sent(self, job_dir: Path, *, newest: int | None, at_ns: int) -> list[SavedRank]:
        """What the other node sends to the one that reports."""
        ranks = []
        for path in job_dirs.boxes(job_dir):
            with OpenBox(path) as box:
                ranks.append(
                    SavedRank(
                        job_dirs.box_rank(path),
                        job_dirs.box_pid(path),
                        SEEN,
                        box.packed(newest=newest),
                        at_ns,
                    )
                )
        return ranks

    @pytest.mark.parametrize(
        "order", list(itertools.permutations(["theirs", "newest", "whole", "newest again"]))
    )
    def test_the_whole_copy_stays_in_whatever_order_they_are_written(
        self, tmp_path: Path, order: tuple[str, ...]
    ) -> None:
        ours, theirs = self.nodes(tmp_path)
        dump = save_dump(ours, tmp_path / "dumps", {}, host="n0", keep=3)
        for what in order:
            if what == "theirs":
                assert save_dump(theirs, tmp_path / "dumps", {2: SEEN}, host="n1", keep=3) == dump
            else:
                ranks = self.sent(
                    theirs, newest=None if what == "whole" else 4, at_ns=UNIX + len(what)
                )
                add_node(dump, ranks, host="n1", job="job-1")
            whole = {"theirs", "whole"} & set(order[: order.index(what) + 1])
            assert holds(dump, ["rank2.102.box", "rank3.103.box"]) is bool(whole)
        assert sorted(path.name for path in dump.glob("*.box")) == [
            f"rank{rank}.{100 + rank}.box" for rank in range(4)
        ]
        evidence = read_evidence(dump)
        assert evidence.problems == []
        assert {log.rank: len(log.collectives) for log in evidence.logs if log.rank > 1} == {
            2: 10,
            3: 10,
        }
        # The node's own copy is newer than what it sent.
        assert all(log.captured_ns > UNIX + 1000 for log in evidence.logs)

    def test_a_copy_with_the_newest_records_is_better_than_none(self, tmp_path: Path) -> None:
        ours, theirs = self.nodes(tmp_path)
        dump = save_dump(ours, tmp_path / "dumps", {}, host="n0", keep=3)
        add_node(dump, self.sent(theirs, newest=4, at_ns=UNIX + 5), host="n1", job="job-1")
        found = read_evidence(dump)
        assert [len(log.collectives) for log in found.logs] == [10, 10, 4, 4]
        assert found.logs[3].captured_ns == UNIX + 5 and found.logs[3].observation == SEEN
        shutil.copy(dump / "rank3.103.newest.box", tmp_path / "left")
        save_dump(theirs, tmp_path / "dumps", {}, host="n1", keep=3)
        # whoever wrote it was killed before it could look again
        shutil.copy(tmp_path / "left", dump / "rank3.103.newest.box")
        assert [len(log.collectives) for log in read_evidence(dump).logs] == [10] * 4
        save_dump(
            live_job(tmp_path / "later", 1, job="job-2"), tmp_path / "dumps", {}, host="n0", keep=1
        )
        assert not dump.exists(), "all its files are known to be commlens's"

    def test_they_write_at_the_same_time(self, tmp_path: Path) -> None:
        ours, theirs = self.nodes(tmp_path)
        dump = save_dump(ours, tmp_path / "dumps", {}, host="n0", keep=3)
        ranks = self.sent(theirs, newest=4, at_ns=UNIX)
        for _ in range(20):
            adder = threading.Thread(
                target=lambda: [add_node(dump, ranks, host="n1", job="job-1") for _ in range(3)]
            )
            adder.start()
            save_dump(theirs, tmp_path / "dumps", {}, host="n1", keep=3)
            adder.join()
            assert sorted(path.name for path in dump.glob("rank[23].*")) == [
                "rank2.102.box",
                "rank3.103.box",
            ]
            for path in dump.glob("rank[23].*"):
                path.unlink()

    def test_a_node_whose_job_has_another_name_there_saves_in_the_same_dump(
        self, tmp_path: Path
    ) -> None:
        ours, theirs = self.nodes(tmp_path, theirs="another-name", restart=2)
        dump = save_dump(ours, tmp_path / "dumps", {}, host="n0", keep=3)
        add_node(dump, self.sent(theirs, newest=4, at_ns=UNIX), host="n1", job="job-1", restart=2)
        assert save_dump(theirs, tmp_path / "dumps", {}, host="n1", keep=3) == dump
        found = read_evidence(dump)
        assert found.problems == []
        assert [(log.rank, log.job, log.restart, len(log.collectives)) for log in found.logs] == [
            (rank, "job-1", 2, 10) for rank in range(4)
        ]
        assert save_dump(ours, tmp_path / "dumps", {}, host="n0", keep=3) == dump


class TestReading:
    def test_the_order_and_the_names_of_files_change_nothing(self, tmp_path: Path) -> None:
        saved = save_dump(live_job(tmp_path, 4), tmp_path / "dumps", {1: SEEN}, host="n03", keep=10)
        busy_box(1, job="stray", pid=7).write(saved)
        busy_box(3, pid=9).write(saved)
        (saved / "notes.txt").write_text("note")
        files = sorted(path for path in saved.iterdir() if path.name != MARKER)
        expected = read_evidence(files)
        assert len(expected.problems) == 3
        order = random.Random(7)
        for _ in range(10):
            order.shuffle(files)
            assert read_evidence([*files, files[0]]) == expected
        for number, path in enumerate(sorted(saved.glob("*.box"))):
            path.rename(saved / f"{'cxabz'[number % 5]}{number}")
        renamed = read_evidence([saved])
        assert ranks_of(renamed) == [0, 1, 2, 3]
        assert [log.collectives for log in renamed.logs] == [
            log.collectives for log in expected.logs
        ]

    def test_files_folders_and_folders_of_jobs(self, tmp_path: Path) -> None:
        job_dir = live_job(tmp_path)
        for paths in (
            [job_dir],
            [str(job_dir.parent)],
            [*job_dir.glob("*.box")],
            [job_dir / "rank0.100.box", job_dir],
        ):
            assert ranks_of(read_evidence(paths)) == [0, 1, 2, 3]
        assert ranks_of(read_evidence([tmp_path])) == [0, 1, 2, 3]

    def test_one_process_with_two_copies(self, tmp_path: Path) -> None:
        job_dir = live_job(tmp_path, 2)
        saved = save_dump(job_dir, tmp_path / "dumps", {}, host="n03", keep=10)
        busy_box(0, 2, pid=100, records=14).write(job_dir)
        evidence = read_evidence([saved, job_dir])
        assert [log.issued for log in evidence.logs] == [14, 10]
        assert (
            evidence.problems[0]
            == f"{saved}/rank0.100.box is left out: it is another copy of the black box"
            f" {job_dir}/rank0.100.box."
        )

    def test_two_processes_of_one_rank(self, tmp_path: Path) -> None:
        busy_box(0, pid=1).write(tmp_path)
        newer = busy_box(0, pid=2)
        newer.write_header(unix=UNIX + 1)
        newer.write(tmp_path)
        evidence = read_evidence([tmp_path])
        assert [log.pid for log in evidence.logs] == [2]
        assert evidence.problems == [
            f"{tmp_path}/rank0.1.box is left out: it is from another process (pid 1) of rank 0 than"
            f" {tmp_path}/rank0.2.box."
        ]

    def test_earlier_runs_of_a_restarted_job(self, tmp_path: Path) -> None:
        for rank in range(3):
            busy_box(rank, pid=10 + rank).write(tmp_path)
        for rank in range(2):
            busy_box(rank, pid=20 + rank, about={"restart": 1}).write(tmp_path)
        evidence = read_evidence([tmp_path])
        assert [(log.rank, log.pid) for log in evidence.logs] == [(0, 20), (1, 21)]
        assert len(evidence.problems) == 1
        assert evidence.problems[0].startswith(
            "3 black boxes of runs before restart 1 of the job are left out: "
        )

    def test_a_box_of_another_job_in_the_folder(self, tmp_path: Path) -> None:
        job_dir = live_job(tmp_path)
        stray = busy_box(2, job="other", pid=5)
        stray.heartbeat(MONO + 10**12)  # though it is newer
        stray.write(job_dir)
        evidence = read_evidence([job_dir])
        assert (ranks_of(evidence), evidence.job, evidence.other_jobs) == (
            [0, 1, 2, 3],
            "job-1",
            ["other"],
        )
        assert evidence.problems == [
            f"1 black box of another job (other, not job-1) is left out: {job_dir}/rank2.5.box."
        ]
        assert ranks_of(read_evidence([job_dir], job="other")) == [2]
        assert (
            read_evidence([job_dir], job="third").problems[0]
            == "There is no black box of job third here, only of job-1, other."
        )

    def test_of_several_jobs_the_last_one(self, tmp_path: Path) -> None:
        for number, job in enumerate(("b", "c", "a")):
            box = busy_box(0, 2, job=job)
            box.heartbeat(MONO + number * 10**9)
            box.write(tmp_path / job)
        evidence = read_evidence([tmp_path])
        assert (evidence.job, evidence.other_jobs) == ("a", ["b", "c"])

    def test_a_box_without_a_rank(self, tmp_path: Path) -> None:
        Box(-1, 0).write(tmp_path)
        evidence = read_evidence([tmp_path])
        assert evidence.logs == []
        assert "never learned its rank" in evidence.problems[0]

    def test_a_path_that_does_not_exist(self, tmp_path: Path) -> None:
        for path in (tmp_path / "nothing", "nul\0byte"):
            with pytest.raises(CommandError, match="cannot be read") as error:
                read_evidence([path])
            assert error.value.exit_code == 2

    def test_everything_that_is_not_evidence_gets_a_sentence(self, tmp_path: Path) -> None:
        good = busy_box(0).write(tmp_path)
        (tmp_path / "empty.box").touch()
        (tmp_path / "rank1.1.box").write_bytes(good.read_bytes()[:2000])
        (tmp_path / "rank2.1.box").write_bytes(b"PK\x03\x04")
        flipped = bytearray(good.read_bytes())
        flipped[40] ^= 1
        (tmp_path / "rank3.1.box").write_bytes(flipped)
        version = busy_box(4)
        version.write_header(version=9)
        version.write(tmp_path)
        (tmp_path / "nccl_trace_rank_0").write_bytes(b"\x80\x04\x95")
        (tmp_path / "train.log").write_text("hello")
        (tmp_path / "other.json").write_text('{"a": 1}')
        (tmp_path / "observed-x.json").write_text('{"schema": "commlens.observed/1", "ranks": {')
        (tmp_path / "observed-y.json").write_text('{"schema": "commlens.observed/7"}')
        (tmp_path / "observed-z.json").write_text(
            '{"schema": "commlens.observed/1", "job": "job-1", "ranks": {"0": {"end": "?",'
            ' "signal": "SIGTERM"}, "x": 1}}'
        )
        os.mkfifo(tmp_path / "pipe.box")
        (tmp_path / "loop").symlink_to(tmp_path)
        (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
        evidence = read_evidence([tmp_path])
        assert ranks_of(evidence) == [0]
        assert evidence.logs[0].observation == Observation(signal="SIGTERM")
        bad = {path.name for path in tmp_path.iterdir()} - {good.name}
        for name in bad:
            assert sum(f"{tmp_path}/{name} " in problem for problem in evidence.problems) == 1, name
        assert len(evidence.problems) == len(bad)
        assert all(problem.endswith(".") for problem in evidence.problems)

    def test_many_foreign_files_are_summed_up(self, tmp_path: Path) -> None:
        busy_box(0).write(tmp_path)
        for number in range(50):
            (tmp_path / f"{number}.txt").write_text("x")
        problems = read_evidence([tmp_path]).problems
        assert len(problems) == 11
        assert problems[-1] == f"40 more files in {tmp_path} are not dumps."

    def test_devices_and_pipes_are_never_opened(self) -> None:
        evidence = read_evidence(["/dev/zero"])
        assert evidence.problems == ["/dev/zero is a device and is left out."]

    def test_without_permission(self) -> None:
        with open_folder() as folder:
            job_dir = live_job(folder)
            (job_dir / "rank1.101.box").chmod(0)
            hidden = folder / "hidden"
            hidden.mkdir(mode=0o700)
            hidden.chmod(0)
            for path in (job_dir.parent, job_dir):
                path.chmod(0o755)
            for path in job_dir.iterdir():
                if path.name != "rank1.101.box":
                    path.chmod(0o644)
            with unprivileged():
                evidence = read_evidence([job_dir, hidden])
            hidden.chmod(0o700)
        assert ranks_of(evidence) == [0, 2, 3]
        assert evidence.problems == [
            f"{job_dir}/rank1.101.box could not be opened: permission denied.",
            f"{hidden} could not be listed: permission denied.",
        ]

    @pytest.mark.launches
    def test_it_needs_neither_torch_nor_rich_nor_numpy(self) -> None:
        code = (
            "import sys, commlens.dumps.save; print(sorted({'torch', 'rich', 'numpy'} &"
            " set(sys.modules)))"
        )
        assert run_code(code).strip() == "[]"

    @settings(
        deadline=None,
        max_examples=examples(40),
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    @given(st.data())
    def test_damage_of_any_file_of_a_dump(self, tmp_path: Path, data: st.DataObject) -> None:
        dump = tmp_path / "dumps"
        shutil.rmtree(dump, ignore_errors=True)
        saved = save_dump(live_job(tmp_path, 3), dump, {0: SEEN, 1: SEEN}, host="n03", keep=10)
        victim = data.draw(st.sampled_from(sorted(saved.iterdir())))
        content = bytearray(victim.read_bytes())
        match data.draw(st.sampled_from(["cut", "flip", "replace", "delete"])):
            case "cut":
                del content[data.draw(st.integers(0, len(content))) :]
            case "flip":
                for at in data.draw(
                    st.lists(st.integers(0, min(len(content), 9000) - 1), min_size=1, max_size=5)
                ):
                    content[at] ^= 1 << data.draw(st.integers(0, 7))
            case "replace":
                content = bytearray(data.draw(st.binary(max_size=200)))
        if content:
            victim.write_bytes(content)
        else:
            victim.unlink()
        evidence = read_evidence([saved])
        untouched = {0, 1, 2} - ({int(victim.name[4])} if victim.suffix == ".box" else set())
        assert untouched <= set(ranks_of(evidence)) or evidence.other_jobs
        assert len(ranks_of(evidence)) == len(set(ranks_of(evidence)))


class TestDiscarding:
    def test_our_files_and_the_folder_go(self, tmp_path: Path) -> None:
        job_dir = live_job(tmp_path)
        (job_dir / "rank9.1.new").write_bytes(bytes(5000))  # its process died while it made it
        discard_job(job_dir)
        assert not job_dir.exists()
        assert job_dir.parent.exists()
        discard_job(job_dir)

    def test_nothing_else_goes(self, tmp_path: Path) -> None:
        job_dir = live_job(tmp_path, 1)
        (job_dir / "rank1.5.box").write_bytes(b"not a black box")
        (job_dir / "notes.txt").touch()
        target = tmp_path / "target.box"
        target.write_bytes(busy_box().bytes())
        (job_dir / "rank2.5.box").symlink_to(target)
        (job_dir / "rank3.5.box").mkdir()
        discard_job(job_dir)
        assert sorted(path.name for path in job_dir.iterdir()) == [
            "notes.txt",
            "rank1.5.box",
            "rank2.5.box",
            "rank3.5.box",
        ]
        assert target.exists()

    def test_a_link_to_a_job_is_not_followed(self, tmp_path: Path) -> None:
        job_dir = live_job(tmp_path)
        (tmp_path / "link").symlink_to(job_dir)
        discard_job(tmp_path / "link")
        assert len(job_dirs.boxes(job_dir)) == 4
        assert (tmp_path / "link").is_symlink()

    def test_several_at_once(self, tmp_path: Path) -> None:
        job_dir = live_job(tmp_path, 16)
        failures: list[BaseException] = []

        def discard() -> None:
            try:
                discard_job(job_dir)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=discard) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert not job_dir.exists()


HEALTH = NodeHealth(
    "n03",
    taken_ns=UNIX,
    ranks=[RankPlace(2, 102, "0000:4f:00.0")],
    events=[HealthEvent(what="xid", fault="gpu-fault", part="0000:4f:00.0", at_ns=UNIX, number=79)],
)


def test_what_the_node_told_of_its_hardware_is_with_its_first_rank(tmp_path: Path) -> None:
    job_dir = live_job(tmp_path)
    saved = save_dump(job_dir, tmp_path / "dumps", {2: SEEN}, host="n03", keep=10, health=HEALTH)
    assert {log.rank: log.health for log in read_evidence(saved).logs if log.health} == {2: HEALTH}


def test_damaged_words_of_a_node_are_left_out(tmp_path: Path) -> None:
    job_dir = live_job(tmp_path)
    saved = save_dump(job_dir, tmp_path / "dumps", {2: SEEN}, host="n03", keep=10, health=HEALTH)
    file = saved / "observed-n03.json"
    content = json.loads(file.read_text())
    content["health"]["events"] = [{"what": "no such thing"}]
    file.write_text(json.dumps(content))
    found = read_evidence(saved)
    assert not any(log.health for log in found.logs)
    assert any("partly damaged" in problem for problem in found.problems)
