"""Every feature of commlens.CommDebugMode, on three models.

    python examples/comm_debug_mode.py                                       all of it, in one process, on the fake backend
    python examples/comm_debug_mode.py --model checkpointed --noise-level 1  some of it
    torchrun --nproc-per-node 2 examples/comm_debug_mode.py                  on gloo; rank 0 prints

The fake backend pretends that there are other ranks and sends nothing: enough to see what a model communicates.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

try:
    import commlens
except ModuleNotFoundError:  # a fresh clone, nothing installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
    import commlens

from models import parallel_mlp, parallel_transformer

NOISE_LEVELS = {
    0: "collectives by module",
    1: "module types, parameters with their placements, DTensor ops",
    2: "other tensor ops too",
    3: "everything, views and the like too",
}


def mlp(mesh: DeviceMesh) -> Callable[[], None]:
    """A tensor-parallel MLP: one all_reduce, in the forward of its second layer."""
    model, batch = parallel_mlp(mesh), torch.rand(8, 10)
    return lambda: model(batch).sum().backward()


def transformer(mesh: DeviceMesh) -> Callable[[], None]:
    """A tensor-parallel transformer: all_reduces in both passes, an all_gather where the logits come together."""
    model, tokens = parallel_transformer(mesh, heads=mesh.size(), width=4 * mesh.size()), torch.randint(0, 8, (8, 8))
    return lambda: model(tokens).sum().backward()


def checkpointed(mesh: DeviceMesh) -> Callable[[], None]:
    """The same with activation checkpointing: what recomputation communicates once more has a heading of its own."""
    sizes = {"heads": mesh.size(), "width": 4 * mesh.size(), "checkpointed": True}
    model, tokens = parallel_transformer(mesh, **sizes), torch.randint(0, 8, (8, 8))
    return lambda: model(tokens).sum().backward()


MODELS = {"mlp": mlp, "transformer": transformer, "checkpointed": checkpointed}


def show(name: str, mesh: DeviceMesh, noise_levels: list[int], folder: Path) -> None:
    """Run one model under CommDebugMode and show what it has to say."""
    step = MODELS[name](mesh)
    comm_mode = commlens.CommDebugMode()
    with comm_mode:
        step()
    if dist.get_rank() != 0:
        return

    print(f"===== {name}: {(MODELS[name].__doc__ or '').strip()}\n")
    print(f"{comm_mode!r}\n")
    print("get_comm_counts(), by op:")
    for packet, count in comm_mode.get_comm_counts().items():
        print(f"  {packet}: {count}")
    assert comm_mode.get_total_counts() == sum(comm_mode.get_comm_counts().values())

    print("\ncomm_module_counts, by module and pass, inclusive of the modules inside:")
    for fqn, passes in comm_mode.comm_module_counts.items():
        print(f"  {fqn}: " + ", ".join(f"{which} {sum(counts.values())}" for which, counts in passes.items() if counts))

    print("\nget_parameter_info(), of modules that were called:")
    for fqn, parameters in list(comm_mode.get_parameter_info().items())[:4]:
        print(f"  {fqn}: " + ", ".join(f"{parameter} {tuple(data.shape)}" for parameter, data in parameters.items()))

    print("\nget_sharding_info():")
    for parameter, placements in list(comm_mode.get_sharding_info().items())[:4]:
        print(f"  {parameter}: {placements}")

    print("\ncomm_module_operation_counts, the first op of each module:")
    for fqn, operations in list(comm_mode.comm_module_operation_counts.items())[:4]:
        first = operations["operations_list"][0]
        print(f"  {fqn}: {len(operations['operations_list'])} ops, {first['name']} {first['input_sharding']}")

    for level in noise_levels:
        print(f"\n----- {name}, noise level {level}: {NOISE_LEVELS[level]}\n")
        print(comm_mode.generate_comm_debug_tracing_table(noise_level=level))
        log, dump = folder / f"{name}-{level}.txt", folder / f"{name}-{level}.json"
        comm_mode.log_comm_debug_tracing_table_to_file(file_name=str(log), noise_level=level)
        comm_mode.generate_json_dump(file_name=str(dump), noise_level=level)
        print(f"The same without colours is in {log}, as JSON in {dump}.")
    print()


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=[*MODELS, "all"], default="all", help="what to run; all unless given")
    parser.add_argument("--noise-level", type=int, choices=[*NOISE_LEVELS], help="how much to print; every level unless given")
    parser.add_argument("--world-size", type=int, default=4, help="ranks to pretend, on the fake backend; 4 unless given")
    parser.add_argument(
        "--out", type=Path, default=Path("comm-debug-mode"), help="folder for logs and JSON; ./comm-debug-mode unless given"
    )
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)

    torch.manual_seed(0)
    if "RANK" in os.environ:  # torchrun
        dist.init_process_group("gloo")
    else:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=options.world_size)
    try:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
        for name in MODELS if options.model == "all" else [options.model]:
            show(name, mesh, [*NOISE_LEVELS] if options.noise_level is None else [options.noise_level], options.out)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
