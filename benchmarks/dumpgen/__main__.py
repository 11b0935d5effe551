"""``python -m dumpgen FOLDER --ranks 64 --fault stuck-before-tp``."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from dumpgen import FAULTS, MESHES, Conditions, Job
from dumpgen.faults import by_name, possible
from dumpgen.mesh import FLAT_MESHES, MEGATRON_MESHES


def main() -> None:
    """Write the dumps of one job, or list the faults."""
    parser = argparse.ArgumentParser(
        prog="python -m dumpgen", description="Write the dumps of a generated job with one fault."
    )
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--list", action="store_true", help="the faults")
    parser.add_argument("--ranks", type=int, default=64, choices=sorted(MESHES))
    parser.add_argument(
        "--megatron", action="store_true", help="a mixture of experts with Megatron's groups"
    )
    parser.add_argument("--flat", action="store_true", help="no pipeline")
    parser.add_argument(
        "--fault", default="stuck-before-tp", choices=[fault.name for fault in FAULTS]
    )
    parser.add_argument("--version", default="2.10")
    parser.add_argument("--timing", action="store_true")
    parser.add_argument("--no-stacks", action="store_true")
    parser.add_argument("--batched-p2p", action="store_true")
    parser.add_argument("--in-flight-only", action="store_true")
    parser.add_argument("--history", type=int, default=40, help="steps before the fault")
    parser.add_argument(
        "--skew", type=float, default=0.02, help="seconds by which the clocks of hosts differ"
    )
    arguments = parser.parse_args()
    if arguments.list or arguments.folder is None:
        for fault in FAULTS:
            print(f"{fault.name:20} {fault.summary}")
        return
    mesh = (
        MEGATRON_MESHES if arguments.megatron else FLAT_MESHES if arguments.flat else MESHES
    ).get(arguments.ranks)
    if mesh is None:
        parser.error(f"There is no such mesh of {arguments.ranks} ranks.")
    if by_name(arguments.fault) not in possible(mesh):
        parser.error(f"{arguments.fault} needs more pipeline stages than this mesh has.")
    conditions = Conditions(
        version=arguments.version,
        timing=arguments.timing,
        stacks=not arguments.no_stacks,
        skew_s=arguments.skew,
        history=arguments.history,
        batched_p2p=arguments.batched_p2p,
        in_flight_only=arguments.in_flight_only,
    )
    job = Job(mesh, by_name(arguments.fault), conditions)
    job.write(arguments.folder, processes=os.cpu_count() or 1)
    print(
        json.dumps(
            {"fault": arguments.fault, "kinds": job.truth.kinds, "culprits": job.truth.culprits}
        )
    )


if __name__ == "__main__":
    main()
