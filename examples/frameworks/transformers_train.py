"""Hugging Face's Trainer. Rank 1 can be given a fault: ``transformers_train.py --fault skip``."""

import argparse
import tempfile
from typing import Any

import torch
from faults import NAMES, leaves_out_the_collective, misbehave
from transformers import Trainer, TrainingArguments


class Model(torch.nn.Module):
    """A linear model that averages its loss over the ranks in every step, for its own log."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.step = 0
        self.layer = torch.nn.Linear(8, 1)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        """Return the loss of one batch."""
        rank, step = torch.distributed.get_rank(), self.step
        self.step += 1
        misbehave(self.fault, rank, step)
        outputs = self.layer(inputs)
        loss = torch.nn.functional.mse_loss(outputs, labels)
        if not leaves_out_the_collective(self.fault, rank, step):
            mean = loss.detach().clone()
            torch.distributed.all_reduce(mean)
            if step == 9 and rank == 0:
                print(f"loss {mean.item() / 2:.6f}")
        return {"loss": loss, "logits": outputs}


def train(fault: str) -> None:
    """Train for ten steps."""
    torch.manual_seed(0)
    data = [{"inputs": torch.randn(8), "labels": torch.randn(1)} for _ in range(80)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, use_cpu=True, per_device_train_batch_size=4, max_steps=10, report_to=[], save_strategy="no", disable_tqdm=True
        )
        Trainer(Model(fault), arguments, train_dataset=data).train()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fault", choices=NAMES, default="none")
    train(parser.parse_args().fault)
