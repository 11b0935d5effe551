"""DeepSpeed with ZeRO-1 on CPUs. Rank 1 can be given a fault: ``deepspeed_train.py --fault skip``."""

import argparse

import deepspeed
import torch
from faults import NAMES, leaves_out_the_collective, misbehave


def train(fault: str) -> None:
    """Train a small model for ten steps."""
    deepspeed.init_distributed(dist_backend="gloo")
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=model, config=config, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    mean = torch.zeros(1)
    for step in range(10):
        misbehave(fault, rank, step)
        loss = torch.nn.functional.mse_loss(engine(torch.randn(4, 8)), torch.randn(4, 1))
        engine.backward(loss)
        engine.step()
        if not leaves_out_the_collective(fault, rank, step):
            mean = loss.detach().clone()
            torch.distributed.all_reduce(mean)
    if rank == 0:
        print(f"loss {mean.item() / 2:.6f}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fault", choices=NAMES, default="none")
    parser.add_argument("--local_rank", type=int, default=-1, help="given by DeepSpeed's launcher")
    train(parser.parse_args().fault)
