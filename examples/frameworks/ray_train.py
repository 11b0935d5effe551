"""Ray Train. Rank 1 can be given a fault: ``ray_train.py --fault skip``."""

import argparse
import os
from pathlib import Path

import ray
import ray.train
import ray.train.torch
import torch
from faults import NAMES, leaves_out_the_collective, misbehave


def train(config: dict[str, str]) -> None:
    """Train a small model for ten steps, in each of Ray's workers."""
    rank = ray.train.get_context().get_world_rank()
    torch.manual_seed(0)
    model = ray.train.torch.prepare_model(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mean = torch.zeros(1)
    for step in range(10):
        misbehave(config["fault"], rank, step)
        loss = torch.nn.functional.mse_loss(model(torch.randn(4, 8)), torch.randn(4, 1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if not leaves_out_the_collective(config["fault"], rank, step):
            mean = loss.detach().clone()
            torch.distributed.all_reduce(mean)
    if rank == 0:
        print(f"loss {mean.item() / 2:.6f}")


def main(fault: str) -> None:
    """Start two workers that record, and train."""
    switches = {name: value for name, value in os.environ.items() if name.startswith("COMMLENS")}
    here = str(Path(__file__).parent)
    ray.init(num_cpus=2, include_dashboard=False, runtime_env={"env_vars": switches | {"PYTHONPATH": here}})
    trainer = ray.train.torch.TorchTrainer(
        train,
        train_loop_config={"fault": fault},
        scaling_config=ray.train.ScalingConfig(num_workers=2, use_gpu=False),
        torch_config=ray.train.torch.TorchConfig(backend="gloo"),
    )
    trainer.fit()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fault", choices=NAMES, default="none")
    main(parser.parse_args().fault)
