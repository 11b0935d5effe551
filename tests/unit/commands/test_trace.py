"""``commlens view`` and ``commlens compare``: what is printed and written, and the exit statuses."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import msgspec
import pytest
from boxes import Box
from traces import Recorder, one_event, training

import commlens
from commlens import commands
from commlens.model.trace import TracedModule
from commlens.traces.rows import COLUMNS
from conftest import RunCommlens


@pytest.fixture
def x(tmp_path: Path) -> Path:
    path = tmp_path / "x.json"
    commlens.Trace(training()).save(path)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "traces"
    for rank in range(8):
        commlens.Trace(training(rank)).save(path / f"trace-rank{rank}.json.gz")
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = commands.main([str(argument) for argument in arguments])
    out = capsys.readouterr()
    return status, out.out, out.err


def test_the_summary(x, capsys):
    status, out, err = run(capsys, "view", x)
    assert status == 0 and err == ""
    assert out.startswith(
        "32 collectives, 340 kB on the wire, over 2 optimizer steps (16 collectives and\n170 kB each),"
    )


def test_a_dump_gets_the_command_that_reads_it(tmp_path, capsys):
    dump = tmp_path / "dump"
    dump.mkdir()
    Box(0, 1).write(dump)
    for path, said in ((dump, "holds a dump"), (next(dump.iterdir()), "is a dump")):
        status, _, err = run(capsys, "view", path)
        assert (
            status == 2
            and err
            == f"commlens: {path} {said} of a job, not a trace: `commlens diagnose {path}`"
            " diagnoses it.\n"
        )
    (tmp_path / "notes.txt").write_text("nothing of a job")
    assert "commlens diagnose" not in run(capsys, "view", tmp_path / "notes.txt")[2]


def test_a_trace_without_measured_times_gets_the_estimate_on_a_network(x, tmp_path, capsys):
    path = tmp_path / "preview.json"
    commlens.Trace(msgspec.structs.replace(training(setup=3), preview=True)).save(path)
    status, out, err = run(capsys, "view", path, "--network", "h100-ib")
    assert (
        status == 0 and err == "" and "Estimated time per step on h100-ib, not a measurement" in out
    )
    assert (
        "All collectives of an average step (of 2), one after another: " in out
        and "\nSetup before the first forward, once: 3 " in out
    )
    summary = json.loads(run(capsys, "view", path, "--network", "h100-ib", "--json")[1])
    assert summary["estimate"]["steps"] == 2 and summary["estimate"]["setup"]["calls"] == 3
    assert "Estimated" not in run(capsys, "view", path)[1]
    # the estimates are beside the measured times
    assert "Estimated" not in run(capsys, "view", x, "--network", "h100-ib")[1]


@pytest.mark.parametrize(
    ("filters", "answer"),
    [
        (
            ["--phase", "backward", "--mesh-dim", "tp", "--module", "layers.1"],
            "2 of 32 collectives",
        ),
        (["--phase", "forward,outside"], "18 of 32"),
        (["--phase", "forward", "--phase", "outside"], "18 of 32"),
        (["--step", "1"], "16 of 32"),
        (["--step", "0:2", "--op", "all_gather"], "8 of 32"),
        (["--cause", "implicit"], "6 of 32"),
        (["--owner", "FSDP2"], "16 of 32"),
        (["--source", "train.py:14", "--dtype", "float32", "--group", "tp"], "8 of 32"),
    ],
)
def test_filters(x, capsys, filters, answer):
    status, out, _ = run(capsys, "view", x, *filters)
    assert status == 0 and out.startswith(answer)


@pytest.mark.parametrize("form", ["--json", "--ops", "--events"])
def test_two_forms_on_one_standard_output_are_refused(x, capsys, form):
    status, out, err = run(capsys, "view", x, "--csv", "-", form)
    assert (status, out) == (2, "") and "--csv - writes to standard output" in err


def test_a_trace_without_tensor_ops_says_so_whatever_the_filters(tmp_path, capsys):
    data = training()
    data.ops.clear()
    commlens.Trace(data).save(tmp_path / "x.json")
    shown = run(capsys, "view", tmp_path / "x.json", "--phase", "forward", "--ops")
    assert shown == (0, "No tensor ops: only a trace with depth ops has them.\n", "")


def test_nothing_matches(x, capsys):
    assert run(capsys, "view", x, "--dtype", "int8") == (
        0,
        "",
        "commlens: No collective has dtype int8. Existing values: float32.\n",
    )
    assert (
        "No collective matches all filters."
        in run(capsys, "view", x, "--phase", "forward", "--op", "reduce_scatter")[2]
    )
    # collectives match, but no tensor op
    outside = run(capsys, "view", x, "--phase", "outside", "--ops")
    assert outside == (0, "", "commlens: No tensor op matches all filters.\n")
    status, _, err = run(capsys, "view", x, "--phase", "backwards")
    assert (
        status == 2 and err == "commlens: There is no phase 'backwards'. Did you mean 'backward'?\n"
    )


@pytest.mark.parametrize(
    ("filters", "message"),
    [
        (["--module", "layer.0"], "The trace has no module 'layer.0'. Did you mean 'layers.0'?"),
        (
            ["--module", "layers.0,blok"],
            "The trace has no module 'blok'. There are MLP, MLP.layers, ",
        ),
        (["--mesh-dim", "ep"], "The trace has no mesh dimension 'ep'. There are dp, tp."),
        (["--group", "pipeline"], "The trace has no group 'pipeline'. There are dp, 4, mesh_dp, "),
        (["--op", "allreduce"], "The trace has no op 'allreduce'. Did you mean 'all_reduce'?"),
    ],
)
def test_a_filter_for_what_does_not_exist_is_wrong_usage(x, capsys, filters, message):
    status, out, err = run(capsys, "view", x, *filters)
    assert (status, out) == (2, "") and err.startswith(f"commlens: {message}") and "...." not in err


def test_a_filter_may_fit_some_of_the_ranks_only(folder, capsys):
    def add(rec: Recorder, step: int) -> None:
        rec.data.modules.append(TracedModule("MLP.head", "Head", 1))

    commlens.Trace(training(3, change=add)).save(folder / "trace-rank3.json.gz")
    assert run(capsys, "view", folder, "--module", "head")[0] == 0
    status, _, err = run(capsys, "view", folder, "--module", "heads")
    assert (
        status == 2 and err == "commlens: The traces have no module 'heads'. Did you mean 'head'?\n"
    )


def test_events(x, capsys):
    status, out, _ = run(capsys, "view", x, "--events", "--module", "layers.0.net2", "--step", "0")
    assert status == 0
    words = " ".join(out.split())
    assert (
        "2 all_reduce tp [0-3] float32 4.0 kB SUM forward of" in words and "at train.py:14" in words
    )
    assert max(map(len, out.splitlines())) <= 120


def test_ops(x, tmp_path, capsys):
    status, out, _ = run(capsys, "view", x, "--ops", "--module", "layers.0")
    assert (
        status == 0
        and "aten.mm.default   forward of MLP.layers.0.net1" in out
        and "[8, 16] (Replicate(),), [16, 4]" in out
    )
    commlens.Trace(one_event()).save(tmp_path / "y.json")
    assert run(capsys, "view", tmp_path / "y.json", "--ops")[1].startswith("No tensor ops")


def test_json(x, capsys):
    summary = json.loads(run(capsys, "view", x, "--json")[1])
    assert summary["calls"] == 32 and summary["schema"] == "commlens.trace-summary/1"


def test_csv(x, tmp_path, capsys):
    status, out, err = run(capsys, "view", x, "--csv", tmp_path / "out.csv")
    assert (status, out) == (0, "") and err == f"commlens: Wrote {tmp_path}/out.csv: 32 rows.\n"
    with (tmp_path / "out.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 32 and tuple(rows[0]) == COLUMNS and rows[0]["module"] == "MLP.layers.0"
    status, _, err = run(capsys, "view", x, "--csv", tmp_path / "out.csv")
    assert (
        status == 2
        and err
        == "commlens: File already exists, will not overwrite without --force:"
        f" {tmp_path}/out.csv\n"
    )
    assert run(capsys, "view", x, "--csv", tmp_path / "out.csv", "--force")[0] == 0
    assert run(capsys, "view", x, "--csv", "-")[1].count("\n") == 33


def test_perfetto(folder, tmp_path, capsys):
    status, _, err = run(capsys, "view", folder, "--perfetto", tmp_path / "p.json")
    assert status == 0 and "https://ui.perfetto.dev" in err
    events = json.loads((tmp_path / "p.json").read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {f"rank {rank}" for rank in range(8)}
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == 8 * 32 * 2
    assert (
        sum(event["ph"] == "s" for event in events)
        == sum(event["ph"] == "f" for event in events)
        == 8 * 32
    )
    assert (
        sum(event["ph"] == "b" for event in events)
        == sum(event["ph"] == "e" for event in events)
        == 8 * 32
    )
    issue = next(
        event for event in slices if event["pid"] == 3 and event["name"] == "all_gather dp"
    )
    assert (
        issue["args"]["module"] == "MLP.layers.0"
        and issue["args"]["input_bytes"] == 16000
        and issue["dur"] == 20.0
    )
    assert issue["ts"] == 1000.0 + 3  # rank 3's trace began 3 us after rank 0's
    assert run(capsys, "view", folder, "--perfetto", tmp_path / "p.json")[0] == 2


def test_summarised_events_have_no_times(tmp_path, capsys):
    path = tmp_path / "x.json"
    commlens.Trace(
        one_event(
            count=5, started_ns=0, returned_ns=0, wait_began_ns=0, wait_ended_ns=0, last_step=4
        )
    ).save(path)
    assert (
        "5 collectives are summarised, have no times"
        in run(capsys, "view", path, "--perfetto", tmp_path / "p.json")[2]
    )


def test_a_folder_of_ranks(folder, capsys):
    status, out, err = run(capsys, "view", folder)
    assert status == 0 and err == ""
    assert out.startswith("All 8 ranks issued the same collectives.\n\n32 collectives, 340 kB")
    (folder / "notes.json").write_text("{}")
    (folder / "README").write_text("hello")
    status, out, err = run(capsys, "view", folder, "--rank", "3")
    assert out.startswith("32 collectives") and "rank 3 of 8." in out
    assert (
        err.startswith(
            f"commlens: {folder}/notes.json is not a trace that can be read: it is JSON without a"
            " schema"
        )
        and "README" not in err
    )
    assert run(capsys, "view", folder, "--rank", "9")[0] == 2


def test_ranks_that_differ(folder, capsys):
    data = training(3)
    data.events.pop()
    commlens.Trace(data).save(folder / "trace-rank3.json.gz")
    status, out, _ = run(capsys, "view", *sorted(folder.iterdir()))
    assert status == 0 and out.startswith(
        "Ranks 0-2,4-7 and rank 3 issued different collectives.\n  - rank 3 issued 1 fewer"
        " all_reduce on tp"
    )
    assert len(json.loads(run(capsys, "view", folder, "--json")[1])) == 8


def test_bad_input(tmp_path, x, capsys):
    (tmp_path / "bad.json").write_text("hello")
    for arguments, message in (
        (["view", tmp_path / "bad.json"], "bad.json is not a trace: it holds no JSON.\n"),
        (["view", tmp_path / "none.json"], "There is no file"),
        (
            ["view", x, x],
            (
                "are both from rank 0: give one file per rank, or compare them with commlens"
                " compare.\n"
            ),
        ),
        (["compare", x, tmp_path / "bad.json"], "it holds no JSON."),
    ):
        status, out, err = run(capsys, *arguments)
        assert (
            status == 2
            and out == ""
            and err.startswith("commlens: ")
            and message in err
            and err.count("\n") == 1
        )
    empty = tmp_path / "empty"
    empty.mkdir()
    good = tmp_path / "good"
    good.mkdir()
    (good / "notes.json").write_text("hello")
    shutil.copy(x, good)
    for folders in ([empty], [good, empty]):
        assert run(capsys, "view", *folders)[2] == (
            f"commlens: There is no trace in {empty}: none of its 0 files named *.json or"
            " *.json.gz is a trace.\n"
        )


def test_compare(tmp_path, x, capsys):
    assert run(capsys, "compare", x, x) == (
        0,
        "Nothing changed: 32 collectives, 340 kB on the wire.\n",
        "",
    )
    other = tmp_path / "y.json.gz"
    commlens.Trace(training(dtype="bfloat16")).save(other)
    status, out, err = run(capsys, "compare", x, other)
    assert status == 1 and err == ""
    lines = " ".join(out.split())
    assert lines.startswith(
        "2 changes: 32 collectives as before, 212 kB on the wire instead of 340 kB (-38%). - 8"
        " all_gather on dp"
    )
    status, out, _ = run(capsys, "compare", x, other, "--json")
    assert status == 1 and [change["kind"] for change in json.loads(out)["changes"]] == [
        "changed",
        "changed",
    ]


def test_compare_of_folders(folder, x, capsys):
    assert run(capsys, "compare", folder, folder)[:2] == (
        0,
        "8 ranks compared. Nothing changed: 256 collectives, 2.7 MB on the wire.\n",
    )
    status, out, _ = run(capsys, "compare", folder, x)
    assert status == 0 and "Not compared: ranks 1-7, traced only in the first run." in out


@pytest.mark.launches
def test_no_torch_and_no_traceback(x, run_commlens: RunCommlens):
    done = run_commlens("view", str(x), environ={"PYTHONPROFILEIMPORTTIME": "1"})
    assert done.returncode == 0
    assert "| torch\n" not in done.stderr and "| numpy\n" not in done.stderr
