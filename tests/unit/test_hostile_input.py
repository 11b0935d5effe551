"""Hostile and broken input: each command says one sentence, with exit status 2 or 3, and still
reads the rest.
"""

from __future__ import annotations

import codecs
import contextlib
import gzip
import io
import json
import os
import pickle
import random
import sqlite3
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from boxes import HEADER, MONO, RECORD, Box, busy_box
from flight_recorder_dumps import dump, entry

from commlens.commands import main
from commlens.diagnosis.graph import build
from commlens.dumps.sources import archives, compression, open_sources
from commlens.formats import trace_json
from commlens.formats.columns import RankColumns
from commlens.formats.flight_recorder.entries import build_table
from commlens.formats.flight_recorder.to_columns import columns_from_table
from commlens.formats.torch_log import read_torch_log
from commlens.formats.trace_json import read_trace
from commlens.model.collective import Channel
from commlens.reports.converted import table
from commlens.traces.rows import to_csv


def write_dumps(folder: Path, **changes: object) -> Path:
    """Two ranks' dumps, of which rank 0's entries are changed."""
    folder.mkdir(exist_ok=True)
    for rank in (0, 1):
        entries = [entry(number, **(changes if rank == 0 else {})) for number in range(3)]
        (folder / f"rank_{rank}").write_bytes(pickle.dumps(dump(entries), protocol=2))
    return folder


def columns(*entries: dict[str, object], **changes: object) -> RankColumns:
    return columns_from_table(build_table(dump(list(entries), **changes)), "rank_0")


class TestFlightRecorder:
    def test_entries_that_are_all_malformed(self) -> None:
        rows = columns(
            entry(0, "nccl:send 0->1", input_sizes="no list"),
            entry(1, "nccl:send 2->3", process_group=7),
        )
        assert len(rows) == 0
        # not 0 or 2, which only the skipped entries name
        assert rows.possible_ranks == (0, 1, 2, 3)

    @pytest.mark.parametrize("key", ["record_id", "collective_seq_id", "op_id", "time_created_ns"])
    def test_integers_that_no_recorder_writes(self, key: str) -> None:
        rows = columns(
            *[
                entry(number, **{key: value})
                for number, value in enumerate([-(1 << 63) + 1, (1 << 63) - 1, 5])
            ]
        )
        changed = {
            "record_id": rows.record_id,
            "collective_seq_id": rows.sequence,
            "op_id": rows.op_id,
            "time_created_ns": rows.created_ns,
        }
        assert np.maximum(changed[key], 0).tolist() == [0, 0, 5]

    @pytest.mark.parametrize(
        "changes",
        [
            {"pg_config": {"0": {"ranks": "[99999999999]"}}},
            {"pg_config": {"9" * 5000: {}}},
            {"pg_status": {"0": {"last_enqueued_collective": "--5"}}},
        ],
    )
    def test_groups_that_no_recorder_writes(self, changes: dict[str, object]) -> None:
        assert len(columns(entry(0), **changes)) == 1

    def test_a_group_that_a_dump_describes_in_two_ways(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The backend is part of an operation's name: with an odd name, it is another one, of the
        same group.
        """
        stuck = {"state": "started", "retired": False, "time_discovered_completed_ns": None}
        odd = "nccl:all_reduce</script>:all_reduce"
        for rank in (0, 1):
            entries = [
                entry(number, odd if number != 3 else "nccl:all_reduce")
                for number in range(8 - rank)
            ]
            if rank == 0:
                entries[-1].update(stuck)
            config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}
            (tmp_path / f"rank_{rank}").write_bytes(
                pickle.dumps(dump(entries, pg_config=config, pg_status={}), protocol=2)
            )
        assert main(["diagnose", str(tmp_path)]) == 1
        assert (
            "rank 1 never reached all_reduce #8 of the default group [0-1]; rank 0 waits"
            in " ".join(capsys.readouterr().out.split())
        )

    def test_a_group_of_more_ranks_than_any_job_has(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        ranks = f"[{', '.join(map(str, range(300_000)))}]"
        (write_dumps(tmp_path) / "rank_0").write_bytes(
            pickle.dumps(
                dump([entry(0)], pg_config={"0": {"desc": "default_pg", "ranks": ranks}}), 2
            )
        )
        main(["diagnose", str(tmp_path), "--json"])
        out = capsys.readouterr().out
        assert (
            "a group lists 300,000 ranks, more than any job has (262,144): its ranks are left out"
            in out
        )
        assert len(out) < 10_000

    def test_a_rank_that_no_job_has(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        write_dumps(tmp_path)
        (tmp_path / "rank_1").rename(tmp_path / "rank_5000000")
        main(["diagnose", str(tmp_path), "--json"])
        out = capsys.readouterr().out
        assert (
            "1 dump of rank 5000000 is left out, because no job has so many ranks (at most 262,144)"
            in out
        )
        assert len(out) < 10_000

    def test_a_dump_of_no_rank_is_too_little_evidence(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "dump").write_bytes(pickle.dumps(dump([]), protocol=2))
        assert main(["diagnose", str(tmp_path / "dump")]) == 3
        assert "neither name nor content shows the rank" in capsys.readouterr().err

    def test_the_diagnosis_of_such_integers(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        numbers = iter([-(1 << 63) + 1, (1 << 63) - 1, -(1 << 62) - 5])
        folder = write_dumps(tmp_path / "dumps")
        entries = [entry(number, collective_seq_id=next(numbers)) for number in range(3)]
        (folder / "rank_0").write_bytes(pickle.dumps(dump(entries), protocol=2))
        assert main(["diagnose", str(folder)]) == 3
        said = capsys.readouterr()
        assert "3 entries have no readable sequence number" in " ".join(said.out.split())
        assert "Traceback" not in said.err

    @pytest.mark.parametrize(
        "changes",
        [
            {"state": "paused", "retired": False},
            {"collective_seq_id": "4"},
            {"process_group": 7},
            {"input_sizes": "x"},
            {"profiling_name": 5},
        ],
        ids=str,
    )
    def test_what_cannot_be_read_is_not_healthy(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, object]
    ) -> None:
        """Nor is it a fault of its rank."""
        config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}
        for rank in (0, 1):
            entries = [
                entry(number, **(changes if (rank, number) == (1, 3) else {}))
                for number in range(4)
            ]
            (tmp_path / f"rank_{rank}").write_bytes(
                pickle.dumps(dump(entries, pg_config=config, pg_status={}), protocol=2)
            )
        assert main(["diagnose", str(tmp_path)]) == 3
        out = " ".join(capsys.readouterr().out.split())
        assert (
            "no fault shows, but" in out
            and "Rank 1: 1 entries" in out
            and "nothing is wrong" not in out
        )


def sources(path: Path) -> tuple[dict[str, int], list[str]]:
    """Names of the sources at a path, with the number of bytes, and the problems."""
    problems: list[str] = []
    found = {}
    for one in open_sources(path, problems):
        found[one.name.removeprefix(f"{path}!")] = len(one.read())
        problems += one.problems
    return found, problems


def tar_member(name: str, content: bytes = b"", **changes: object) -> bytes:
    about = tarfile.TarInfo(name)
    about.size = len(content)
    for key, value in changes.items():
        setattr(about, key, value)
    return about.tobuf(tarfile.GNU_FORMAT) + content + bytes(-len(content) % 512)


class TestArchives:
    @pytest.mark.parametrize("packed", [False, True])
    @pytest.mark.parametrize(
        ("hostile", "why"),
        [
            (
                tar_member("header", type=tarfile.XHDTYPE, size=1 << 60),
                "claims 1152921504606846976 bytes",
            ),
            (
                tar_member("header", type=tarfile.GNUTYPE_LONGNAME, size=1 << 40),
                "claims 1099511627776 bytes",
            ),
            (
                tar_member("name", b"x\0", type=tarfile.GNUTYPE_LONGNAME) * 5000,
                "more than 100 extension headers",
            ),
            (tar_member("negative", size=-1024), "claims -1024 bytes"),
        ],
        ids=["pax", "long name", "nested", "negative"],
    )
    def test_absurd_headers(self, tmp_path: Path, hostile: bytes, why: str, packed: bool) -> None:
        content = tar_member("rank_0", b"first") + hostile + bytes(10240)
        (tmp_path / "dumps.tar").write_bytes(gzip.compress(content) if packed else content)
        found, problems = sources(tmp_path / "dumps.tar")
        assert found == {"rank_0": 5}
        assert len(problems) == 1
        assert why in problems[0]

    def test_the_rest_of_the_input_is_read(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder = write_dumps(tmp_path / "dumps")
        (folder / "more.tar").write_bytes(tar_member("header", type=tarfile.XHDTYPE, size=1 << 60))
        assert main(["diagnose", str(folder)]) in (0, 1)
        assert main(["diagnose", str(folder / "more.tar")]) == 3
        assert capsys.readouterr().err.count("\n") <= 4

    def test_a_member_has_a_limit(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(archives, "HELD_MAX", 1 << 20)
        with zipfile.ZipFile(tmp_path / "dumps.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("rank_0", bytes(2 << 20))
            archive.writestr("rank_1", b"whole")
        found, problems = sources(tmp_path / "dumps.zip")
        assert found == {"rank_0": 1 << 20, "rank_1": 5}
        assert problems[0].endswith(
            "only its first 1 MiB were read. To read all of it, unpack the archive first."
        )

    def test_a_compressed_file_has_a_limit(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(compression, "UNPACKED_MAX", 1 << 20)
        (tmp_path / "rank_0.gz").write_bytes(gzip.compress(os.urandom(3 << 20), 1))
        found, problems = sources(tmp_path / "rank_0.gz")
        assert 1 << 20 <= sum(found.values()) <= 2 << 20
        assert "times the file's size, 1 MiB, and for all" in problems[0]

    def test_a_compressed_trace_has_a_limit(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(trace_json, "UNPACKED_MAX", 1 << 20)
        (tmp_path / "x.json.gz").write_bytes(gzip.compress(bytes(4 << 20)))
        assert main(["view", str(tmp_path / "x.json.gz")]) == 2
        assert "unpacks to more than 1 MiB" in capsys.readouterr().err


class TestPipes:
    @pytest.mark.parametrize("verb", ["diagnose", "compare", "convert", "view"])
    @pytest.mark.parametrize("kind", ["pipe", "device"])
    def test_is_refused(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str, kind: str
    ) -> None:
        path = "/dev/zero"
        if kind == "pipe":
            path = str(tmp_path / "pipe")
            os.mkfifo(path)
        more = {"compare": [path], "convert": ["--to", "csv", "-o", str(tmp_path / "out.csv")]}.get(
            verb, []
        )
        assert main([verb, path, *more]) in (2, 3)
        error = capsys.readouterr().err
        assert path in error
        assert "Traceback" not in error


class TestCsv:
    @pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@SUM(A1)", "\tx", "\rx"])
    def test_texts_that_begin_like_a_formula(self, tmp_path: Path, text: str) -> None:
        assert f"'{text}" in to_csv([{"source": text, "peer": -1}])
        assert ",-1," in to_csv([{"source": text, "peer": -1}])
        rows = columns(entry(0, process_group=(text, ""), collective_seq_id=-1))
        rows.host = text
        cells = b"".join(table.to_csv([rows])).decode()
        # control characters in a dump are escaped when it is read
        assert cells.count(f"'{text}") == (2 if text.isprintable() else 1)
        assert ",-1," in cells


COMMANDS = [
    ["diagnose"],
    ["diagnose", "--json"],
    ["diagnose", "--entries", "--stacks"],
    ["diagnose", "--html", "OUT"],
    ["convert", "--to", "csv", "-o", "OUT"],
    ["convert", "--to", "perfetto", "-o", "OUT"],
    ["convert", "--to", "fr-json", "-o", "OUT"],
    ["convert", "--to", "fr-pickle", "-o", "OUT"],
]


def run(command: list[str], tmp_path: Path, *paths: Path) -> int:
    """Run a command with its output encoded strictly, as into a pipe or a file."""
    out = str(tmp_path / "out")
    printed = io.TextIOWrapper(io.BytesIO(), "utf-8", errors="strict")
    with contextlib.redirect_stdout(printed):
        status = main(
            [
                command[0],
                *map(str, paths),
                *(out if argument == "OUT" else argument for argument in command[1:]),
            ]
        )
        printed.flush()
    written = [Path(out)] if Path(out).is_file() else list(Path(out).glob("*"))
    assert sum(path.stat().st_size for path in written) + len(printed.buffer.getvalue()) < 1 << 20  # type: ignore[attr-defined]
    return status


SURROGATE = "a\ud800b"
HUGE = "x" * 300_000
CONTROLS = "a\x1b]0;title\x07\x1b[2J\x7f\x9b31m\u202e"
"""Sets the terminal's title, clears its screen, changes its colours and reverses its text."""


class TestTexts:
    @pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
    @pytest.mark.parametrize("text", [SURROGATE, HUGE], ids=["surrogate", "huge"])
    @pytest.mark.parametrize("form", ["pickle", "json"])
    def test_of_dumps(self, tmp_path: Path, command: list[str], text: str, form: str) -> None:
        folder = tmp_path / ("dumps" if text is HUGE else "dumps\udcff")
        folder.mkdir()
        for rank in (0, 1):
            entries = [
                entry(
                    number,
                    f"nccl:{text if number else 'all_reduce'}",
                    process_group=(text, text),
                    input_dtypes=[text],
                    state="scheduled" if number == 2 and not rank else "completed",
                    frames=[{"name": text, "filename": f"/work/{text}.py", "line": 3}],
                )
                for number in range(3 - rank)
            ]
            status = {
                text: {
                    "last_enqueued_collective": 3 - rank,
                    "last_started_collective": -1,
                    "last_completed_collective": 2,
                }
            }
            whole = dump(
                entries,
                pg_config={text: {"name": text, "desc": text, "ranks": "[0, 1]"}},
                pg_status=status,
            )
            content = (
                json.dumps(whole).encode() if form == "json" else pickle.dumps(whole, protocol=2)
            )
            (folder / f"rank_{rank}").write_bytes(content)
        assert run(command, tmp_path, folder) in (0, 1)

    @pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
    @pytest.mark.parametrize("source", ["pickle", "json", "box", "log"])
    def test_that_would_control_the_terminal(
        self, tmp_path: Path, command: list[str], source: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder = tmp_path / "dumps"
        folder.mkdir()
        for rank in (0, 1):
            if source == "box":
                box = Box(rank, 2, job="job", host=CONTROLS, about={"script": CONTROLS})
                about = {
                    "group": box.group(CONTROLS, "0-1", desc=CONTROLS),
                    "asked": box.asked(f"all_reduce{CONTROLS}"),
                }
                stack = box.stack((f"/work/{CONTROLS}.py", 3, CONTROLS))
                for number in range(1, 4 - rank):
                    box.record(**about, stack=stack, seq=number)
                box.evidence(
                    [
                        {
                            "tid": 5,
                            "name": CONTROLS,
                            "main": True,
                            "f": [[f"/work/{CONTROLS}.py", 3, CONTROLS]],
                        }
                    ]
                )
                box.heartbeat(MONO + 60 * 10**9)
                box.write(folder)
            elif source == "log":
                lines = (
                    f"[rank{rank}]: [PG ID 0 PG GUID 0({CONTROLS}) Rank {rank}] watchdog: last"
                    f" enqueued work: {3 - rank}, last completed "
                    f'work: 1\nTraceback (most recent call last):\n  File "/work/{CONTROLS}.py",'
                    f" line 3, in {CONTROLS}\n"
                    f"ValueError: {CONTROLS}\n"
                )
                # with which it would not count as text
                (folder / f"rank_{rank}.log").write_text(lines.replace("\x07", ""))
            else:
                entries = [
                    entry(
                        number,
                        f"nccl:all_reduce{CONTROLS}",
                        process_group=("0", CONTROLS),
                        input_dtypes=[CONTROLS],
                        state="scheduled" if number == 2 else "completed",
                        frames=[{"name": CONTROLS, "filename": f"/work/{CONTROLS}.py", "line": 3}],
                    )
                    for number in range(3 - rank)
                ]
                whole = dump(
                    entries, pg_config={"0": {"name": "0", "desc": CONTROLS, "ranks": "[0, 1]"}}
                )
                content = (
                    json.dumps(whole).encode()
                    if source == "json"
                    else pickle.dumps(whole, protocol=2)
                )
                (folder / f"rank_{rank}").write_bytes(content)
        out = str(tmp_path / "written")
        main(
            [
                command[0],
                str(folder),
                *(out if argument == "OUT" else argument for argument in command[1:]),
            ]
        )
        printed = "".join(capsys.readouterr())
        assert not set("\x1b\x07\x7f\x9b\u202e") & set(printed), printed
        assert command[0] == "convert" or source == "log" or "x1b" in printed, (
            "it is shown, escaped"
        )

    def test_is_cut_with_one_note(self) -> None:
        rows = columns(
            entry(
                0, process_group=(HUGE, HUGE), frames=[{"name": HUGE, "filename": HUGE, "line": 3}]
            )
        )
        assert rows.problems == ["texts of up to 300000 characters were cut to 4096"]
        assert len(rows.channels[0].group.name) < 4200

    def test_of_traces(self, tmp_path: Path) -> None:
        trace = {"schema": "commlens.trace/1", "commlens_version": HUGE, "groups": [], "events": []}
        paths = [tmp_path / name for name in ("a\udcff.json", "b\udcff.json")]
        for path in paths:
            path.write_text(json.dumps(trace))
        assert read_trace(paths[0]).coverage.blind == [
            "Texts of more than 4096 characters were cut."
        ]
        for command in (["view"], ["view", "--json"], ["view", "-o", "OUT"]):
            assert run(command, tmp_path, paths[0]) == 0
        for command in (
            ["compare"],
            ["compare", "--json"],
            ["compare", "--html", "OUT", "--force"],
        ):
            assert run(command, tmp_path, *paths) == 0

    def test_of_logs(self, tmp_path: Path) -> None:
        line = (
            f"[rank0]: [PG ID 0 PG GUID {'x' * 50_000}(default_pg) Rank 0] watchdog: last enqueued"
            " work: 3, last completed work: 2"
        )
        (tmp_path / "job.log").write_text(
            f"{line}\n{line.replace('Rank 0', 'Rank ' + '9' * 5000)}\n"
        )
        assert run(["diagnose", "--json"], tmp_path, tmp_path / "job.log") in (0, 1, 3)

    def test_of_observations(self, tmp_path: Path) -> None:
        ranks = {"0": {"pid": 5, "end": "killed", "signal": HUGE, "seen_ns": 5}}
        content = {
            "schema": "commlens.observed/1",
            "host": HUGE,
            "job": HUGE,
            "ranks": ranks,
            "problems": [HUGE] * 3,
        }
        (tmp_path / "observed\udcff.json").write_text(json.dumps(content))
        assert run(["diagnose", "--json"], tmp_path, tmp_path / "observed\udcff.json") in (0, 1)


class TestManyOfAKind:
    def test_ranks_that_each_wait_in_another_collective(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(build, "_EDGES_MAX", 500)
        monkeypatch.setattr(build, "_EDGES_PER_RANK", 1)
        lines = [
            f"[rank{rank}]:[E626 06:24:40.90 ProcessGroupNCCL.cpp:616] [PG ID 0 PG GUID"
            f" 0(default_pg) Rank {rank}] Watchdog caught collective operation timeout:"
            f" WorkNCCL(SeqNum={rank + 1}, OpType=ALLREDUCE, NumelIn=1, NumelOut=1,"
            " Timeout(ms)=600000) ran for 600020 milliseconds before timing out."
            for rank in range(50)
        ]
        (tmp_path / "job.log").write_text("\n".join(lines))
        assert main(["diagnose", str(tmp_path / "job.log")]) == 1
        printed = capsys.readouterr().out
        assert "too many different collectives" in " ".join(printed.split())
        assert "nothing is wrong" not in printed

    def test_groups_in_a_log_take_linear_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        compared = 0

        def count(one: Channel, other: object) -> bool:
            nonlocal compared
            compared += 1
            return isinstance(other, Channel) and one.group.name == other.group.name

        monkeypatch.setattr(Channel, "__eq__", count)
        line = (
            "[rank0]: [PG ID {0} PG GUID g{0}(tp) Rank 0] Watchdog caught collective operation"
            " timeout: WorkNCCL(SeqNum=3, OpType=ALLREDUCE, NumelIn=1, NumelOut=1,"
            " Timeout(ms)=600000) ran for 600020 milliseconds before timing out."
        )
        (rows,) = read_torch_log(
            io.BytesIO("\n".join(line.format(number) for number in range(200)).encode()), "job.log"
        )
        assert rows.channel.tolist() == list(range(200))
        assert compared < 1000


GOOD = dump([entry(number) for number in range(3)])
TEXT = json.dumps(GOOD)


def _write(name: str, content: bytes | str) -> Callable[[Path], object]:
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(data)


def _pickled(*entries: object, **changes: object) -> bytes:
    return pickle.dumps(dump(list(entries), **changes), protocol=2)  # type: ignore[arg-type]


def _sparse(folder: Path) -> None:
    with (folder / "rank_0").open("wb") as file:
        file.truncate(200 << 20)


def _link_loop(folder: Path) -> None:
    for name, target in (("a", "b"), ("b", "a"), ("self", "."), ("zero", "/dev/zero")):
        (folder / name).symlink_to(target)


def _named_like_dumps(folder: Path) -> None:
    (folder / "rank_0.json" / "rank_2.pkl").mkdir(parents=True)


def _database(folder: Path) -> None:
    with contextlib.closing(sqlite3.connect(folder / "rank_0.pkl")) as database:
        database.execute("create table entries (record_id)")


def _tar_of_links(folder: Path) -> None:
    links = [
        ("rank_0", tarfile.SYMTYPE, "/etc/passwd"),
        ("rank_2", tarfile.LNKTYPE, "rank_2"),
        ("rank_3", tarfile.CHRTYPE, ""),
    ]
    members = (tar_member(name, type=kind, linkname=target) for name, kind, target in links)
    (folder / "dumps.tar").write_bytes(b"".join(members) + bytes(1024))


def _zip_of_paths(folder: Path) -> None:
    with zipfile.ZipFile(folder / "dumps.zip", "w") as archive:
        archive.writestr("../../rank_0", pickle.dumps(GOOD))
        archive.writestr("/etc/rank_2", b"\0")


def _boxes(change: Callable[[Box, random.Random], object]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        for rank in (0, 1):
            box = busy_box(rank)
            change(box, random.Random(rank))
            box.write(folder)

    return write


def _scramble(box: Box, draw: random.Random, start: int, end: int) -> None:
    box.data[start:end] = draw.randbytes(end - start)


KINDS: dict[str, Callable[[Path], object]] = {
    "nested pickle": _write("rank_0", b"\x80\x02" + b"]" * 20_000 + b"a" * 19_999 + b"."),
    "pickle that doubles": _write(
        "rank_0",
        b"\x80\x02]q\0" + b"".join(b"(h%ch%clq%c" % (i, i, i + 1) for i in range(100)) + b".",
    ),
    "pickle that claims a terabyte": _write(
        "rank_0", b"\x80\x04\x8d" + struct.pack("<Q", 1 << 40) + b"abc."
    ),
    "pickle of a huge integer": _write(
        "rank_0",
        b"\x80\x02}X\1\0\0\0e\x8b" + struct.pack("<i", 1 << 20) + b"\xff" * (1 << 20) + b"s.",
    ),
    "pickle of a command": _write("rank_0", b"cos\nsystem\n(S'touch run'\ntR."),
    "nested JSON": _write("rank_0.json", "[" * 200_000 + "]" * 200_000),
    "huge integer in JSON": _write(
        "rank_0.json",
        TEXT.replace('"collective_seq_id": 1', '"collective_seq_id": ' + "9" * 100_000, 1),
    ),
    "references in a circle": _write(
        "rank_0.json", '{"version": "2.10", "entries": [{"$ref": "#/entries/0"}], "pg_config": 0}'
    ),
    "NaN and Infinity": _write(
        "rank_0.json",
        TEXT.replace('_created_ns": ', '_created_ns": NaN, "x": ').replace("null", "Infinity"),
    ),
    "keys that repeat": _write(
        "rank_0.json", TEXT[:-1] + ', "entries": 5, "entries": [], "entries": {"a": 1}}'
    ),
    "UTF-16": _write("rank_0.json", TEXT.encode("utf-16")),
    "two byte order marks": _write("rank_0.json", codecs.BOM_UTF8 * 2 + TEXT.encode()),
    "gzip members and garbage": _write("rank_0.gz", gzip.compress(TEXT.encode()) * 3 + b"garbage"),
    "truncated msgpack": _write("rank_0", b"\x82\xa7entries\xdd\x7f\xff\xff\xff\x81"),
    "names that control the terminal": _write("rank_0\n\x1b[31mVERDICT", b"garbage"),
    "ranks below zero": _write(
        "rank_-3",
        _pickled(
            entry(0), pg_config={"0": {"name": "0", "desc": "default_pg", "ranks": "[-1, -5, 0]"}}
        ),
    ),
    "thirty thousand ranks": _write(
        "rank_0",
        _pickled(
            entry(0),
            pg_config={"0": {"name": "0", "desc": "default_pg", "ranks": str(list(range(30_000)))}},
        ),
    ),
    "times before and after all time": _write(
        "rank_0", _pickled(*[entry(i, time_created_ns=(1 << 62) * (-1) ** i) for i in range(4)])
    ),
    "tensors of 2000 dimensions": _write(
        "rank_0", _pickled(entry(0, input_sizes=[[1 << 62] * 2000], output_sizes=[[-1] * 2000]))
    ),
    "entries that are none": _write(
        "rank_0", _pickled(entry(0, state=[1], profiling_name=5), 5, None, "x", [], {})
    ),
    "nothing but zeros": _write("rank_0", bytes(1000)),
    "a line of a log without an end": _write("x.log", "[rank0]: " + "A" * 2_000_000),
    "a sparse file": _sparse,
    "links in a circle": _link_loop,
    "folders named like dumps": _named_like_dumps,
    "a database": _database,
    "tar of links": _tar_of_links,
    "zip of paths": _zip_of_paths,
    "boxes of random records": _boxes(
        lambda box, draw: _scramble(box, draw, HEADER, HEADER + 16 * RECORD)
    ),
    "boxes with a random header": _boxes(lambda box, draw: _scramble(box, draw, 200, HEADER)),
    "boxes with random texts": _boxes(
        lambda box, draw: _scramble(box, draw, box.side_at, box.side_at + 4096)
    ),
    "boxes that are cut": _boxes(lambda box, draw: box.data.__delitem__(slice(HEADER + 100, None))),
}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_hostile_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    """Beside a good dump, each command ends with a status of its own, soon, and without a
    traceback.
    """
    folder = tmp_path / "in"
    folder.mkdir()
    if not kind.startswith("boxes"):
        (folder / "rank_1").write_bytes(pickle.dumps(GOOD, protocol=2))
    KINDS[kind](folder)
    path, out = str(folder), str(tmp_path / "out")
    for command in (
        ["diagnose", path],
        ["diagnose", "--entries=5", path],
        ["compare", path, path],
        ["convert", "--to", "csv", "-o", out, path],
        ["view", path],
    ):
        assert main(command) in (0, 1, 2, 3)
        said = "".join(capsys.readouterr())
        assert "Traceback" not in said and "\x1b" not in said and len(said) < 20_000
    assert not (tmp_path / "run").exists() and not Path("run").exists()


def test_nothing_is_said_of_ranks_without_a_readable_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    KINDS["boxes of random records"](tmp_path)
    assert main(["diagnose", str(tmp_path)]) == 3
    assert "nothing can be said: no record of ranks 0-1 is readable" in " ".join(
        capsys.readouterr().out.split()
    )


def test_json_with_a_byte_order_mark(tmp_path: Path) -> None:
    for rank in (0, 1):
        (tmp_path / f"rank_{rank}.json").write_bytes(codecs.BOM_UTF8 + TEXT.encode())
    assert main(["diagnose", str(tmp_path)]) in (0, 1)
