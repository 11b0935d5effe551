"""Whatever is handed over: the commands end, say something in words, and show no traceback."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import os
import pickle
import shutil
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from boxes import busy_box
from builders import Job, Stay, at, training
from chosen import examples
from flight_recorder_dumps import dump, entry
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from commlens import commands
from commlens.formats.rank_log_columns import columns_from_log
from commlens.reports.converted.flight_recorder import to_json, to_pickle


def seeds() -> list[bytes]:
    """Good files of every kind."""
    logs = Job(4).run(training(at(2, 2, Stay(57, "load_batch")), steps=3)).logs()
    box = busy_box(0, records=3)
    log = (
        b"[rank1]:[E1122 07:21:08 ProcessGroupNCCL.cpp:632] [Rank 1] Watchdog caught collective"
        b" operation timeout: WorkNCCL(SeqNum=41, "
    )
    log += (
        b"OpType=ALLREDUCE, NumelIn=100, NumelOut=100, Timeout(ms)=600000) ran for 600009"
        b" milliseconds before timing out.\n"
    )
    observed = {
        "schema": "commlens.observed/1",
        "host": "n03",
        "job": "job-1",
        "ranks": {"0": {"pid": 1, "end": "killed"}},
    }
    return [
        *(to_pickle(columns_from_log(one), []) for one in logs),
        *(to_json(columns_from_log(one), []) for one in logs[:2]),
        box.bytes(),
        log,
        json.dumps(observed).encode(),
        b"",
        b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00lsq\x00\x85q\x01Rq\x02.",
        b"\x1f\x8b\x08\x00",
        b"BZh9",
    ]


SEEDS = seeds()
PACKS: list[Callable[[bytes], bytes]] = [lambda data: data, gzip.compress, bz2.compress]
NAMES = st.sampled_from(
    [
        "rank_0",
        "_dump_1",
        "nccl_trace_rank_2.json",
        "x",
        "rank0.1.box",
        "a.tar",
        "b.zip",
        "log.txt",
        "-",
        "\udcff\n",
        ".hidden",
    ]
)


@st.composite
def contents(draw: st.DrawFn) -> bytes:
    data = bytearray(draw(st.sampled_from(SEEDS) | st.binary(max_size=200)))
    for place, noise in draw(
        st.lists(st.tuples(st.integers(0, 1 << 20), st.binary(min_size=1, max_size=6)), max_size=3)
    ):
        at = place % (len(data) + 1)
        data[at : at + len(noise)] = noise
    cut = draw(st.none() | st.integers(0, 1 << 20))
    return draw(st.sampled_from(PACKS))(
        bytes(data if cut is None else data[: cut % (len(data) + 1)])
    )


@st.composite
def files(draw: st.DrawFn) -> dict[str, bytes]:
    found = draw(st.dictionaries(NAMES, contents(), max_size=4))
    packed = draw(st.sampled_from(["", "tar", "tgz", "zip"]))
    if not packed:
        return found
    held = io.BytesIO()
    if packed == "zip":
        with zipfile.ZipFile(held, "w") as archive:
            for name, content in found.items():
                archive.writestr(name.encode("ascii", "replace").decode(), content)
    else:
        with tarfile.open(fileobj=held, mode="w:gz" if packed == "tgz" else "w") as tar:
            for name, content in found.items():
                about = tarfile.TarInfo(name)
                about.size = len(content)
                tar.addfile(about, io.BytesIO(content))
    return {f"all.{packed}": held.getvalue()}


@pytest.mark.parametrize("command", ["diagnose", "convert", "compare"])
@settings(
    max_examples=examples(40),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(found=files(), nested=st.booleans())
def test_any_files(
    command: str, capsys: pytest.CaptureFixture[str], found: dict[str, bytes], nested: bool
) -> None:
    folder = Path(tempfile.mkdtemp())
    try:
        for number, (name, content) in enumerate(found.items()):
            place = folder / f"node{number}" if nested else folder
            place.mkdir(exist_ok=True)
            (place / name).write_bytes(content)
        arguments = {
            "diagnose": ["diagnose", str(folder), "--entries", "5", "--stacks"],
            "convert": [
                "convert",
                str(folder),
                "--to",
                "fr-pickle",
                "-o",
                str(folder / "out"),
                "--force",
            ],
            "compare": ["compare", str(folder), str(folder)],
        }[command]
        status = commands.main(arguments)
        said = capsys.readouterr()
        assert status in (0, 1, 2, 3)
        assert said.out or said.err
        assert "Traceback" not in said.out + said.err
        said.out.encode()
    finally:
        shutil.rmtree(folder)


ODD = "</script><script>alert(1)</script>\u2028\"'`--><!-- 0->1 <-2 "
OPS = [
    "all_reduce",
    "broadcast",
    "reduce_scatter",
    "all_to_all",
    "gather",
    "barrier",
    "coalesced",
    "send 0->1",
    "recv 1<-0",
    "send 2->2",
    "recv 9<-0",
    "send ->",
    "recv -1<--1",
    f"all_reduce{ODD}",
    f"send 0->1{ODD}",
    ODD,
    "",
    "all_reduce\n#3",
]
NUMBERS = st.integers(0, 4) | st.sampled_from([-1, 9, 1 << 31, (1 << 63) - 1, -(1 << 63)])
GROUPS = [("0", "default_pg"), ("1", "dp"), ("1", "tp"), ("1", ODD), (ODD, ODD), ("", "")]
RANKS = ["[0, 1, 2]", "[0, 1]", "[2, 1, 0]", "[]", "[0, 0]", "[7]", "0", "", None]


@st.composite
def entries(draw: st.DrawFn) -> dict[str, object]:
    """One entry, of a form that torch writes, with values that it does not."""
    number = draw(st.integers(0, 5))
    made = entry(
        number, draw(st.sampled_from(["nccl:", "gloo:", "mpi:", ""])) + draw(st.sampled_from(OPS))
    )
    made |= draw(
        st.fixed_dictionaries(
            {},
            optional={
                "process_group": st.sampled_from(GROUPS),
                "pg_id": NUMBERS,
                "collective_seq_id": NUMBERS,
                "p2p_seq_id": NUMBERS,
                "record_id": NUMBERS,
                "op_id": NUMBERS,
                "is_p2p": st.booleans(),
                "state": st.sampled_from(["scheduled", "started", ODD]),
                "retired": st.booleans(),
                "time_created_ns": NUMBERS,
                "time_discovered_completed_ns": NUMBERS | st.none(),
                "input_sizes": st.sampled_from([[], [[]], [[1 << 62, 8]], [[-1]], "x", [[4], [4]]]),
                "input_dtypes": st.just([ODD]),
                "frames": st.sampled_from([[], [{"name": ODD, "filename": ODD, "line": -1}], [{}]]),
            },
        )
    )
    return made


@st.composite
def flight_recorders(draw: st.DrawFn) -> dict[str, object]:
    """A dump with gaps, repeated numbers, and odd names, groups and states."""
    config = draw(
        st.dictionaries(st.sampled_from(["0", "1", ODD, ""]), st.sampled_from(RANKS), max_size=3)
    )
    status = {
        "last_enqueued_collective": draw(NUMBERS),
        "last_started_collective": -1,
        "last_completed_collective": draw(NUMBERS),
    }
    return dump(
        draw(st.lists(entries(), max_size=7)),
        pg_config={
            name: {
                "name": name,
                "desc": draw(st.sampled_from(["default_pg", "dp", ODD])),
                "ranks": each,
            }
            for name, each in config.items()
        },
        pg_status=draw(
            st.sampled_from([{}, {"0": status}, {"0": status, "1": status}, {"x": ODD}])
        ),
        **({"comm_lib_version": ODD} if draw(st.booleans()) else {}),
    )


@pytest.mark.parametrize("json_too", [False, True], ids=["terminal", "page and json"])
@settings(
    max_examples=examples(100),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(dumps=st.lists(flight_recorders(), min_size=1, max_size=4))
def test_any_flight_recorder_dump(
    json_too: bool, capsys: pytest.CaptureFixture[str], dumps: list[dict[str, object]]
) -> None:
    """No number, name or group of a dump needs to have a counterpart in it or in another rank's."""
    folder = Path(tempfile.mkdtemp())
    try:
        for rank, content in enumerate(dumps):
            (folder / f"rank_{rank}").write_bytes(pickle.dumps(content, protocol=2))
        more = ["--json", "--html", str(folder / "page.html")] if json_too else ["--entries", "5"]
        status = commands.main(["diagnose", str(folder), *more])
        said = capsys.readouterr()
        assert status in (0, 1, 3)
        assert said.out or said.err
        assert "Traceback" not in said.out + said.err
    finally:
        shutil.rmtree(folder)


@settings(
    max_examples=examples(60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    arguments=st.lists(
        st.text(max_size=12).filter(lambda text: not text.startswith(("/", "-")))
        | st.sampled_from(["-x", "--entries", "--json", "--ranks"]),
        max_size=4,
    )
)
def test_any_arguments(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str]
) -> None:
    before = Path.cwd()
    os.chdir(tmp_path)
    try:
        status = commands.main(["diagnose", *arguments])
    except SystemExit as ended:  # argparse
        status = ended.code  # type: ignore[assignment]
    finally:
        os.chdir(before)
    assert status in (2, 3)
    assert "Traceback" not in capsys.readouterr().err


def test_a_pickle_that_would_run_code_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (os.mkdir, (str(tmp_path / "made"),))

    (tmp_path / "rank_0").write_bytes(pickle.dumps({"entries": [], "version": Evil()}, protocol=2))
    assert commands.main(["diagnose", str(tmp_path)]) == 3
    assert not (tmp_path / "made").exists()
    assert "rank_0" in capsys.readouterr().err
