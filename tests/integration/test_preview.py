"""Any rank of any world in one process: what a preview sees is what the program issues, on real
tensors and on fake ones.
"""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from chosen import chosen, long
from zygote_client import Zygote

from conftest import REPOSITORY, SOURCE

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.timeout(360)

HERE = Path(__file__).parent
VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
QUIET = {
    **os.environ,
    "PYTHONPATH": f"{SOURCE}:{HERE}",
    "PYTHONWARNINGS": "ignore",
    "OMP_NUM_THREADS": "1",
}


@pytest.fixture(scope="module")
def report(
    request: pytest.FixtureRequest, zygote: Zygote, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Everything that previews in one process can show, from one process."""
    out = tmp_path_factory.mktemp("preview") / "report.json"
    families = [family for (family,) in chosen(request, "family") if family]
    printed = zygote.run(
        *(str(HERE / "preview_programs.py"), str(out), *families),
        folder=out.parent,
        timeout_s=340,
    )
    assert out.exists(), printed
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.mark.parametrize(
    "family",
    [
        "fsdp2",
        long("tp_mlp"),  # tensor parallelism is in the three dimensions, messages in the pipeline
        long("ring_by_hand"),
        long("point_to_point"),
        long("functional_calls"),
        long("hsdp"),
        long("fsdp2_tp"),
        long("moe"),
        long("checkpoint_non_reentrant"),
        long("clipping"),
        long("plain_calls"),
        long("coalescing"),
    ],
)
def test_a_family_issues_in_a_preview_what_it_issues_on_the_bare_backend(report, family):
    if family not in report["families"]:
        pytest.skip("not with this torch")
    found = report["families"][family]
    for kind in ("fake",) if VERSION < (2, 13) and "fsdp" in family else ("real", "fake"):
        assert found[kind] == found["truth"] > 0, found
        assert found[f"{kind} unclassified"] == 0


@pytest.mark.parametrize("kind", ["real", "fake"])
@pytest.mark.parametrize(
    ("name", "rank", "size", "expected"),
    [
        # 1 bucket, then 2: they are rebuilt after the first step
        ("ddp", 2, 4, {"all_gather": 1, "broadcast": 4, "all_reduce": 5}),
        ("ddp_hook", 0, 4, {"all_gather": 1, "broadcast": 2, "all_reduce": 1}),
        (
            "objects source",
            0,
            4,
            {
                "broadcast": 3,
                "scatter": 2,
                "send": 2,
                "all_gather": 3,
                "gather": 1,
                "recv": 1,
                "barrier": 1,
            },
        ),
        (
            "objects",
            3,
            4,
            {"broadcast": 3, "scatter": 2, "recv": 3, "all_gather": 3, "gather": 1, "barrier": 1},
        ),
        ("objects anyhow", 3, 4, {"broadcast": 4, "recv": 2}),
        ("spawned", 2, 4, {"all_reduce": 1}),
        # as on GPUs: on a CPU mesh DTensor would gather
        ("exchange", 1, 4, {"scatter": 1, "all_to_all": 1}),
    ],
)
def test_programs_for_gpus_run_unchanged(report, name, rank, size, expected, kind):
    found = report["programs"][name]
    assert found[f"{kind} as"] == [rank, size, True, 0], found
    if VERSION >= (2, 13):
        assert found[kind] == expected
    assert found[kind]


@pytest.mark.parametrize(
    "kind",
    [
        "real",
        pytest.param(
            "fake", marks=pytest.mark.skipif(VERSION < (2, 13), reason="2.6 pickles tensors")
        ),
    ],
)
def test_every_stage_of_a_pipeline_learns_its_shapes_from_the_others(report, kind):
    first, middle, last = (
        report["programs"][f"pipeline {which}"][kind] for which in ("first", "middle", "last")
    )
    # Four microbatches forward and back; what comes on top tells shapes, and differs by version.
    assert first["send"] >= 4
    assert first["recv"] >= 4
    assert last["recv"] >= 4
    assert middle["send"] >= 8
    assert middle["recv"] >= 8
    assert middle["send"] > first["send"]


@pytest.mark.skipif(VERSION < (2, 13), reason="2.6 cannot run FSDP2's backward on a CPU")
def test_one_process_previews_rank_after_rank_of_a_pipeline_of_sharded_tensor_parallel_stages(
    report,
):
    """DTensor's caches would keep the groups of the rank before."""
    found = report["three dimensions"]
    assert len(found) == 4
    stages: dict[tuple[int, int], dict[str, int]] = {}
    for name, (groups, counted, unclassified) in found.items():
        size, rank = map(int, name.split())
        half, data = size // 2, size // 4
        stage, pair = divmod(rank, half)
        tp = [rank // 2 * 2, rank // 2 * 2 + 1]
        assert groups == {
            "pp": [pair, pair + half],
            "tp": tp,
            "dp": [stage * half + pair % 2 + 2 * other for other in range(data)],
        }, name
        # Only the second stage's input needs a gradient, which TP reduces, and only there FSDP2
        # gathers again for backward.
        assert stages.setdefault((size, stage), counted) == counted, name
        assert counted["dp reduce_scatter"] == 2, name
        assert unclassified == 0, name
    assert stages[8, 0] == stages[64, 0] != stages[8, 1] == stages[64, 1]


def test_buckets_of_ddp_have_owners(report):
    assert report["ddp owners"] == {"bucket 0": 1, "bucket 1": 1}


def test_fake_tensors_need_no_memory_and_say_what_was_made_up(report):
    size, blind = report["huge"]
    assert size == 2 << 40
    (said,) = blind
    assert re.fullmatch(
        r"The program read values of fake tensors, which were invented: preview_programs.py:\d+\.",
        said,
    )


def test_the_process_is_left_as_it_was(report):
    assert report["unchanged"] is True


def test_steps_end_a_preview(report):
    assert report["steps"] == [2, 1]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("rank", "CommandError: There is no rank 4 in a world of size 4"),
        ("raises", "ZeroDivisionError: division by zero"),
        (
            "no source",
            (
                "CommandError: The program needs an object that rank 0 broadcasts; run as rank 0,"
                " it ends before that: ValueError: no data"
            ),
        ),
        (
            "values",
            "CommandError: The shape of the result of aten.nonzero.default at preview_programs.py",
        ),
        ("group", "CommandError: This process already has a process group"),
    ],
)
def test_errors_are_the_programs_own_or_sentences(report, name, message):
    assert report["errors"][name].startswith(message)


# --- the command


def preview(
    zygote: Zygote, *arguments: str, expect: int = 0, cwd: Path
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "commlens", "preview", *arguments]
    done = zygote.call(command, env=QUIET, cwd=cwd, timeout_s=120)
    assert done.returncode == expect, done.stdout + done.stderr
    return done


SCRIPT = """
import sys
import torch, torch.distributed as dist
import helper

dist.init_process_group("nccl")
print("started as", dist.get_rank(), sys.argv, __name__)
settings = [helper.SETTINGS if dist.get_rank() == 0 else None]
dist.broadcast_object_list(settings, 0)
dist.all_reduce(torch.ones(settings[0]["width"], device="cuda"))
helper.SETTINGS = None  # a second run in this process must import it afresh
if "raise" in sys.argv:
    raise ValueError("a bad batch")
sys.exit(7)
"""


def test_a_script_is_run_as_another_rank_to_learn_what_that_one_sends(zygote, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "helper.py").write_text("SETTINGS = {'width': 1000}")
    options = [
        "--world-size",
        "16",
        "--rank",
        "9",
        "--output",
        "x.json",
        "--network",
        "a100-ib",
        "--ranks-per-node",
        "4",
    ]
    done = preview(zygote, *options, "train.py", "--rank", "3", expect=7, cwd=tmp_path)
    assert "started as 9 ['train.py', '--rank', '3'] __main__" in done.stdout
    assert "started as 0" not in done.stdout
    hint = (
        "commlens: --rank stands after train.py, so train.py gets it; to give it to commlens, put"
        " it before the script.\n"
    )
    assert (
        done.stderr
        == hint
        + "commlens: The program needs an object that rank 0 broadcasts: running it as rank 0 up to"
        " that point.\n"
    )
    assert "3 collectives" in done.stdout
    assert "Estimated time per step on a100-ib, changed, not a measurement" in done.stdout
    assert "300 GB/s inside a node of 4" in " ".join(done.stdout.split())
    saved = json.loads((tmp_path / "x.json").read_text())
    assert (saved["rank"], saved["world_size"], saved["preview"]) == (9, 16, True)
    assert saved["events"][-1]["input_bytes"] == 4000
    assert saved["events"][-1]["source"]["line"] == 10


@pytest.mark.long
def test_a_script_that_raises_is_shown_until_there(zygote, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "helper.py").write_text("SETTINGS = {'width': 1000}")
    done = preview(zygote, "--world-size", "4", "train.py", "raise", expect=1, cwd=tmp_path)
    trace, *_, error, empty, note = done.stderr.splitlines()
    assert trace == "Traceback (most recent call last):"
    assert done.stderr.count("  File ") == 1
    assert (error, empty) == ("ValueError: a bad batch", "")
    assert note == "commlens: the program failed; the trace covers the time before the failure."
    assert "3 collectives" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--world-size", "4", "nothing.py"], "The program nothing.py cannot be read"),
        (["--world-size", "4", "--rank", "4", "x.py"], "There is no rank 4 in a world of size 4"),
        (
            ["--world-size", "4", "--network", "h100", "x.py"],
            "There is no network preset 'h100'. Did you mean",
        ),
        (["--world-size", "4", "--ranks-per-node", "0", "x.py"], "must be at least 1"),
        (["--world-size", "4"], "Which program?"),
        (
            ["--world-size", "4", "--output", "x.py", "x.py"],
            "File already exists, will not overwrite without --force: x.py",
        ),
    ],
)
def test_wrong_usage_is_a_sentence(tmp_path, call_commlens, arguments, message):
    (tmp_path / "x.py").write_text("")
    done = call_commlens("preview", *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("commlens: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.long
@pytest.mark.skipif(VERSION < (2, 13), reason="2.6 cannot shard 128256 rows over 64 x 8")
def test_llamas_shapes_on_512_ranks(zygote, tmp_path):
    script = str(REPOSITORY / "examples" / "preview_llama.py")
    done = preview(
        zygote,
        "--world-size",
        "512",
        "--rank",
        "511",
        "--fake-tensors",
        "--output",
        "x.json",
        script,
        "--layers",
        "2",
        cwd=tmp_path,
    )
    rows = {
        m[1]: (int(m[2]), int(m[3]))
        for m in re.finditer(r"^(tp|dp) +(\d+) +(\d+) ", done.stdout, re.MULTILINE)
    }
    # FSDP2: 3 gathers, 2 again for backward, 3 scatters, 1 all-reduce for clipping. TP: 10 a layer
    # and more around them.
    assert rows["dp"] == (64, 9)
    assert rows["tp"][0] == 8
    saved = json.loads((tmp_path / "x.json").read_text())
    assert saved["coverage"]["unclassified"] == 0
    assert saved["groups"][saved["events"][0]["group"]]["ranks"] == list(range(7, 512, 8))
    parameters = {
        f"{module['path']}.{one['name']}": one
        for module in saved["modules"]
        for one in module.get("parameters", ())
    }
    assert parameters["FSDPLlama.layers.1.attention.wo.weight"] == {
        "name": "weight",
        "placements": "(Shard(dim=0), Shard(dim=1))",
        "shape": [4096, 4096],
        "dtype": "float32",
        "local_bytes": 4096 * 4096 * 4 // 512,
        "mesh": "DeviceMesh((dp=64, tp=8), 'cpu', stride=(8, 1))",
    }
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 2_000_000  # kB
