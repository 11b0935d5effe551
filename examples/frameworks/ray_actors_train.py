"""Actors of Ray, started one by one, that meet in a group. Rank 1 can be given a fault: ``ray_actors_train.py --fault stop``."""

import argparse
import os
import socket
from pathlib import Path

import ray
import torch
import torch.distributed as dist
from faults import NAMES, misbehave


@ray.remote(num_cpus=1)
class Rollout:
    """One process of the group."""

    def train(self, rank: int, port: int, fault: str) -> float:
        """Meet the other actor and sum with it ten times."""
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
        total = torch.ones(1)
        for step in range(10):
            misbehave(fault, rank, step)
            dist.all_reduce(total)
            total /= 2
        dist.destroy_process_group()
        return total.item()


def main(fault: str) -> None:
    """Start the actors, which record, one after the other, and wait for their results."""
    switches = {name: value for name, value in os.environ.items() if name.startswith("COMMLENS")}
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    ray.init(num_cpus=2, include_dashboard=False, runtime_env={"env_vars": switches | {"PYTHONPATH": path}})
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    results = [Rollout.remote().train.remote(rank, port, fault) for rank in range(2)]
    print(f"loss {sum(ray.get(results)):.6f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fault", choices=NAMES, default="none")
    main(parser.parse_args().fault)
