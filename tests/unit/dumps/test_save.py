"""Saving the dump of a job."""

from __future__ import annotations

import json
import os
import re
import stat
import time
from pathlib import Path

import pytest
from boxes import busy_box
from live_jobs import SEEN, live_job, open_folder, ranks_of, run_code, unprivileged

from commlens.blackbox.reader import read_box
from commlens.dumps.detect import MARKER
from commlens.dumps.read import read_evidence
from commlens.dumps.save import (
    SavedRank,
    add_node,
    dump_name,
    earlier_verdicts,
    save_dump,
    save_reports,
)
from commlens.errors import DumpError
from commlens.model.verdict import Verdict
from commlens.reports.page import render_page


class TestSaving:
    def test_older_jobs_of_ours_are_pruned_and_nothing_else(self, tmp_path: Path) -> None:
        dumps = tmp_path / "dumps"
        dumps.mkdir()
        (dumps / "mine").mkdir()
        (dumps / "mine" / "rank0.1.box").write_bytes(busy_box().bytes())
        (dumps / "readme.md").write_text("x")
        precious = tmp_path / "precious"
        precious.mkdir()
        (precious / MARKER).write_text('{"schema": "commlens.dump/1", "saved_ns": 1}')
        (precious / "rank0.1.box").write_bytes(busy_box().bytes())
        (dumps / "link").symlink_to(precious)
        for number in range(5):
            saved = save_dump(
                live_job(tmp_path, 1, job=f"job-{number}x"), dumps, {}, host="n03", keep=3
            )
            if number == 0:
                (saved / "notes.txt").write_text("keep me")
                first = saved
        assert sorted(re.sub(r"train.*(?=-)", "", path.name) for path in dumps.iterdir()) == [
            "-0x",
            "-2x",
            "-3x",
            "-4x",
            "link",
            "mine",
            "readme.md",
        ]
        assert [path.name for path in first.iterdir()] == ["notes.txt"]
        assert (dumps / "mine" / "rank0.1.box").exists()
        assert len(list(precious.iterdir())) == 2

    def test_reports_lie_beside_a_dump_and_go_with_it(self, tmp_path: Path) -> None:
        page, verdict = render_page("verdict", title="t", data={}), Verdict().to_json()
        saved = save_dump(live_job(tmp_path), tmp_path / "dumps", {}, host="n03", keep=1)
        assert save_reports(saved, host="n03", page=page, verdict=verdict) == saved / "index.html"
        assert (saved / "index.html").read_bytes() == page and (
            saved / "verdict.json"
        ).read_bytes() == verdict
        assert read_evidence([saved]).problems == []
        # Another node that saves into the same folder has a verdict of its own.
        save_dump(live_job(tmp_path), tmp_path / "dumps", {}, host="n04", keep=1)
        assert (
            save_reports(saved, host="n04", page=page, verdict=verdict) == saved / "index-n04.html"
        )
        save_dump(live_job(tmp_path, job="job-2"), tmp_path / "dumps", {}, host="n03", keep=1)
        assert not saved.exists()

    def test_earlier_verdicts_are_of_the_same_command_and_user_and_not_old(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        dumps = tmp_path / "dumps"
        for number in range(3):
            job = live_job(tmp_path, job=f"job-{number}")
            saved = save_dump(job, dumps, {}, host="n03", keep=9)
            save_reports(saved, host="n03", page=b"", verdict=b"%d" % number)
        marker = json.loads((saved / MARKER).read_text())
        now = time.time_ns()

        def found(**changed: object) -> list[bytes]:
            (saved / MARKER).write_text(json.dumps(marker | changed))
            return [each.content for each in earlier_verdicts(dumps, [job], now)]

        assert found() == [b"2", b"1", b"0"]
        for changed in (
            {"program": "another"},
            {"saved_ns": now + 1},
            {"saved_ns": now - 8 * 86_400 * 10**9},
            {"saved_ns": None},
        ):
            assert found(**changed) == [b"1", b"0"]
        (dumps / "link").symlink_to(saved)
        assert len(found()) == 3
        assert earlier_verdicts(tmp_path / "none", [job], now) == []
        assert earlier_verdicts(dumps, [tmp_path / "none"], now) == []
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        assert found() == []

    def test_a_folder_of_somebody_elses_is_filled_but_never_marked(self, tmp_path: Path) -> None:
        target = tmp_path / "dumps" / dump_name([live_job(tmp_path)])
        target.mkdir(parents=True)
        (target / "theirs.txt").write_text("x")
        save_dump(live_job(tmp_path), tmp_path / "dumps", {}, host="n03", keep=1)
        assert not (target / MARKER).exists()
        save_dump(live_job(tmp_path, job="job-2"), tmp_path / "dumps", {}, host="n03", keep=1)
        assert len(list(target.iterdir())) == 6

    def test_a_link_in_the_jobs_place_is_not_followed(self, tmp_path: Path) -> None:
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        (tmp_path / "dumps").mkdir()
        (tmp_path / "dumps" / dump_name([live_job(tmp_path)])).symlink_to(elsewhere)
        with pytest.raises(DumpError, match="No dump could be written to"):
            save_dump(live_job(tmp_path), tmp_path / "dumps", {}, host="n03", keep=1)
        assert list(elsewhere.iterdir()) == []

    def test_a_box_that_is_too_large_or_damaged_is_left_out_with_a_sentence(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("commlens.dumps.save.BOX_BYTES_MAX", 1 << 20)
        job_dir = live_job(tmp_path, 2)
        busy_box(2, pid=102, capacity=4000).write(job_dir)
        (job_dir / "rank3.103.box").write_bytes(b"x" * 5000)
        saved = save_dump(job_dir, tmp_path / "dumps", {}, host="n03", keep=3)
        evidence = read_evidence([saved])
        assert ranks_of(evidence) == [0, 1]
        large, damaged = evidence.problems
        assert large.startswith("rank2.102.box was not saved: it has ")
        assert (
            damaged
            == f"rank3.103.box was not saved: {job_dir}/rank3.103.box is not a commlens black box."
        )
        monkeypatch.setattr("commlens.dumps.save.BOX_BYTES_MAX", 100)
        with pytest.raises(
            DumpError,
            match=r"None of the 4 black boxes in .* could be saved: rank0\.100\.box was not saved",
        ):
            save_dump(job_dir, tmp_path / "dumps2", {}, host="n03", keep=3)

    @pytest.mark.parametrize(
        ("mode", "modes"),
        [(None, {0o600, 0o700}), (0o640, {0o640, 0o750}), (0o664, {0o664, 0o775})],
    )
    def test_its_permissions(self, tmp_path: Path, mode: int | None, modes: set[int]) -> None:
        before = os.umask(0o077)
        try:
            options = {} if mode is None else {"mode": mode}
            saved = save_dump(
                live_job(tmp_path), tmp_path / "dumps", {0: SEEN}, host="n03", keep=3, **options
            )
            save_reports(saved, host="n03", page=b"<!", verdict=b"{}", **options)
            add_node(
                saved, [SavedRank(5, 7, SEEN, b"COMMPACK", 1)], host="n04", job="job-1", **options
            )
        finally:
            os.umask(before)
        assert len(list(saved.iterdir())) == 10
        assert {stat.S_IMODE(path.stat().st_mode) for path in (saved, *saved.iterdir())} == modes

    def test_a_whole_copy_replaces_the_newest_records_that_another_node_saved(
        self, tmp_path: Path
    ) -> None:
        job_dir = live_job(tmp_path)
        saved = save_dump(job_dir, tmp_path / "dumps", {}, host="n03", keep=3)
        add_node(saved, [SavedRank(5, 7, SEEN, b"COMMPACK", 1)], host="n04", job="job-1")
        assert (saved / "rank5.7.newest.box").exists()
        busy_box(5, 8, pid=7).write(job_dir)
        save_dump(job_dir, tmp_path / "dumps", {5: SEEN}, host="n04", keep=3)
        listed = json.loads((saved / "observed-n04.json").read_bytes())["saved"]
        assert sorted(listed) == sorted(path.name for path in saved.glob("*.box"))
        assert "rank5.7.box" in listed and "rank5.7.newest.box" not in listed

    def test_nothing_to_save(self, tmp_path: Path) -> None:
        with pytest.raises(DumpError, match="There are no black boxes in"):
            save_dump(tmp_path / "gone", tmp_path / "dumps", {}, host="n03", keep=3)
        assert not (tmp_path / "dumps").exists()

    def test_names_from_the_environment_stay_inside(self, tmp_path: Path) -> None:
        job_dir = tmp_path / "box" / "..evil"
        busy_box().write(job_dir)
        saved = save_dump(job_dir, tmp_path / "dumps", {}, host="../../n03\n", keep=3)
        assert saved.parent == tmp_path / "dumps"
        assert len(list(saved.iterdir())) == 3
        assert sorted(path.name for path in tmp_path.iterdir()) == ["box", "dumps"]

    @pytest.mark.parametrize("root", ["file/dumps", "file", "/proc/nothing/here"])
    def test_a_folder_that_cannot_be_made(self, tmp_path: Path, root: str) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(
            DumpError, match=r"No dump could be written to .*: .*\. Choose another folder"
        ):
            save_dump(live_job(tmp_path), tmp_path / root, {}, host="n03", keep=3)

    def test_a_read_only_folder(self) -> None:
        with open_folder() as folder:
            job_dir = live_job(folder, 1)
            dumps = folder / "dumps"
            dumps.mkdir(mode=0o555)
            for path in folder.rglob("*"):
                is_open = path.is_dir() and path != dumps
                path.chmod(0o755 if is_open else path.stat().st_mode | 0o444)
            with unprivileged(), pytest.raises(DumpError) as error:
                save_dump(job_dir, dumps, {}, host="n03", keep=3)
            target = dumps / dump_name([job_dir])
        assert (
            str(error.value)
            == f"No dump could be written to {target}: permission denied. Choose another folder"
            " with the setting dump_dir."
        )

    def test_a_folder_in_which_names_cannot_be_read(self) -> None:
        """As a site's folder for everybody's dumps: one may write into it, and not see others'."""
        with open_folder() as folder:
            job_dir, dumps = live_job(folder, 1), folder / "dumps"
            dumps.mkdir()
            dumps.chmod(0o333)
            for path in (job_dir, *job_dir.iterdir()):
                path.chmod(0o777)
            with unprivileged():
                saved = save_dump(job_dir, dumps, {}, host="n03", keep=3)
                assert earlier_verdicts(dumps, [job_dir], time.time_ns()) == []
            assert saved == dumps / dump_name([job_dir]) and ranks_of(read_evidence([saved])) == [0]

    @pytest.mark.launches
    @pytest.mark.parametrize(("limit", "saved"), [(100, 0), (2000, 1)])
    def test_no_room(self, tmp_path: Path, limit: int, saved: int) -> None:
        """A limit on the size of files stands for a full disk: the write fails in the middle of a
        file.
        """
        job_dir = live_job(tmp_path, 1)
        busy_box(1, pid=200, capacity=2000, records=500).write(job_dir)
        code = f"""
import resource
from pathlib import Path
from commlens.errors import DumpError
from commlens.dumps.save import save_dump
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
try:
    save_dump(Path({str(job_dir)!r}), Path({str(tmp_path / "dumps")!r}), {{}}, host="n03", keep=3)
except DumpError as error:
    print(error)
"""
        assert (
            f"could not be written (file too large); {saved} of 2 black boxes were saved"
            in run_code(code)
        )
        left = [path for path in (tmp_path / "dumps").rglob("*") if path.is_file()]
        assert sorted(path.name for path in left) == (
            [] if not saved else [MARKER, "rank0.100.box"]
        )
        for path in left:
            if path.suffix == ".box":
                assert read_box(path).problems == []
