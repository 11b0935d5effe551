"""Lightning's Trainer, which starts rank 1 itself. Rank 1 can be given a fault: ``lightning_train.py --fault skip``."""

import argparse
from typing import Any

import lightning
import torch
from faults import NAMES, leaves_out_the_collective, misbehave


class Model(lightning.LightningModule):
    """A linear model that averages its loss over the ranks in every step."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Return the loss of one batch."""
        misbehave(self.fault, self.global_rank, batch_idx)
        inputs, targets = batch
        loss = torch.nn.functional.mse_loss(self.layer(inputs), targets)
        if not leaves_out_the_collective(self.fault, self.global_rank, batch_idx):
            mean = self.all_gather(loss.detach()).mean()
            if batch_idx == 9 and self.global_rank == 0:
                print(f"loss {mean.item():.6f}")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(fault: str) -> None:
    """Train for ten steps."""
    lightning.seed_everything(0, verbose=False)
    data = torch.utils.data.TensorDataset(torch.randn(80, 8), torch.randn(80, 1))
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    trainer.fit(Model(fault), torch.utils.data.DataLoader(data, batch_size=4))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fault", choices=NAMES, default="none")
    train(parser.parse_args().fault)
