"""Dumps that torch itself has written are read, by the reader in C too, and as pickle and JSON
alike.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from commlens.dumps import detect
from commlens.dumps.sources import open_sources
from commlens.formats.columns import RETIRED
from commlens.formats.flight_recorder import reader
from commlens.formats.flight_recorder.reader import (
    read_flight_recorder_json,
    read_flight_recorder_pickle,
)

PROGRAM = """
import datetime, pickle, sys, warnings
import torch, torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace, _dump_fr_trace_json
warnings.simplefilter("ignore")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=datetime.timedelta(seconds=30))
group = dist.new_group([0], group_desc="second")
for step in range(20):
    dist.all_reduce(torch.ones(4, 2))
    dist.broadcast(torch.ones(3, dtype=torch.bfloat16), 0, group=group)
    dist.all_gather([torch.ones(2)], torch.ones(2))
dist.barrier()
while not all(entry["retired"] for entry in pickle.loads(_dump_fr_trace())["entries"]):
    pass  # gloo's thread lets the main thread go before it retires the entry
for name, content in (("pickle", _dump_fr_trace()), ("json", _dump_fr_trace_json())):
    with open(f"{sys.argv[1]}/dump_0.{name}", "wb") as file:
        file.write(content)
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dumps")
    environ = {**os.environ, "TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), str(folder)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=100,
    )
    if "_dump_fr_trace" in done.stderr:
        pytest.skip("this torch cannot write the dump of a gloo job")
    assert done.returncode == 0, done.stderr
    return folder


def test_torchs_own_pickle_goes_through_the_reader_in_c(folder):
    if not reader.AVAILABLE:
        pytest.skip("the reader in C was not built here")
    assert reader.read_table((folder / "dump_0.pickle").read_bytes()) is not None


def test_both_forms_say_the_same(folder):
    pickled = read_flight_recorder_pickle((folder / "dump_0.pickle").read_bytes(), "pickle")
    text = read_flight_recorder_json((folder / "dump_0.json").read_bytes(), "json")
    assert pickled.origin == "gloo-recorder" and pickled.problems == text.problems == []
    assert len(pickled) == len(text) == 61 and set(pickled.state.tolist()) == {RETIRED}
    for name in (
        "channel",
        "args_index",
        "sequence",
        "record_id",
        "created_ns",
        "timeout_ms",
        "retired",
    ):
        assert getattr(pickled, name).tolist() == getattr(text, name).tolist(), name
    assert (
        pickled.args == text.args
        and pickled.channels == text.channels
        and pickled.status == text.status
    )
    assert [channel.group.description for channel in pickled.channels] == ["default_pg", "second"]
    first = pickled.args[pickled.args_index[1]]
    assert (first.op, first.inputs[0].dtype, first.inputs[0].shape) == (
        "broadcast",
        "bfloat16",
        (3,),
    )
    assert any(frame.function == "broadcast" for frame in pickled.call_stacks[pickled.stack[1]])


def test_they_are_told_by_their_content(folder):
    problems: list[str] = []
    kinds = {
        source.name.rsplit(".", 1)[1]: detect.detect_kind(source.head())
        for source in open_sources([str(folder)], problems)
    }
    assert (
        kinds == {"pickle": detect.FLIGHT_RECORDER_PICKLE, "json": detect.FLIGHT_RECORDER_JSON}
        and not problems
    )
