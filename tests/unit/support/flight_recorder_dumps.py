"""Flight Recorder dumps for tests, as torch 2.13 writes them."""

from __future__ import annotations

import json
import pickle
from typing import Any

from commlens.diagnosis.index.columns import RankOps, SharedIds, reduce_all
from commlens.formats.columns import RankColumns
from commlens.formats.flight_recorder.reader import read_flight_recorder_pickle
from commlens.model.collective import Collective


def entry(number: int, name: str = "nccl:all_reduce", **changes: Any) -> dict[str, Any]:
    """One entry: completed, of the default group."""
    point_to_point = "->" in name or "<-" in name
    return {
        "frames": [{"name": "step", "filename": "/work/train.py", "line": 81}],
        "record_id": number,
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "thread_name": "python",
        "thread_id": "140",
        "collective_seq_id": 0 if point_to_point else number + 1,
        "p2p_seq_id": number + 1 if point_to_point else 0,
        "op_id": number + 1,
        "profiling_name": name,
        "time_created_ns": 1_700_000_000_000_000_000 + number,
        "input_sizes": [[4, 2]],
        "input_dtypes": ["Float"],
        "output_sizes": [[4, 2]],
        "output_dtypes": ["Float"],
        "state": "completed",
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": 1_700_000_000_100_000_000 + number,
        "retired": True,
        "timeout_ms": 600000,
        "is_p2p": point_to_point,
        **changes,
    }


def dump(entries: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    """A whole dump."""
    return {
        "version": "2.10",
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"}},
        "comm_lib_version": "2.27.3",
        "pg_status": {
            "0": {
                "last_enqueued_collective": 3,
                "last_started_collective": -1,
                "last_completed_collective": 2,
            }
        },
        "entries": entries,
        **changes,
    }


def operation(rows: RankColumns, row: int) -> Collective:
    """One operation of a rank, as diagnosis sees it."""
    (dump,) = reduce_all([rows])
    return RankOps(dump, dump.channels, SharedIds()).op(row)


def as_json(value: Any) -> bytes:
    """As torch writes it: sorted, no frames, 0 for None, status as text."""
    changed = json.loads(json.dumps(value))
    changed["pg_status"] = {
        key: {name: str(last) for name, last in one.items()}
        for key, one in changed["pg_status"].items()
    }
    for one in changed["entries"]:
        del one["frames"]
        one["time_discovered_started_ns"] = one["time_discovered_started_ns"] or 0
    return json.dumps(changed, sort_keys=True, separators=(",", ":")).encode()


def columns_from_table(value: Any, protocol: int = 2) -> RankColumns:
    """Pickle a dump as torch does, and read it."""
    return read_flight_recorder_pickle(pickle.dumps(value, protocol), "rank_3")
