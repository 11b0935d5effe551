"""torchft: two replica groups of one process each, whose gradients a quorum averages. Replica 1 can be given a fault:
``torchft_train.py --fault error``.
"""

import argparse
import os
import subprocess
import sys
from datetime import timedelta

import torch
from faults import NAMES, misbehave

WAIT = timedelta(seconds=20)


def train(replica: int, fault: str) -> None:
    """Train a small model for ten steps, in one replica."""
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    torch.manual_seed(0)
    layer = torch.nn.Linear(8, 1)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=WAIT),
        min_replica_size=2,
        load_state_dict=layer.load_state_dict,
        state_dict=layer.state_dict,
        replica_id=f"replica_{replica}",
        timeout=WAIT,
    )
    model = DistributedDataParallel(manager, layer)
    optimizer = Optimizer(manager, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(10):
        misbehave(fault, replica, step)
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(torch.randn(4, 8)), torch.randn(4, 1))
        loss.backward()
        optimizer.step()
    print(f"loss {loss.item():.6f}", flush=True)
    manager.shutdown(wait=False)


def main(fault: str) -> int:
    """Start the lighthouse and both replicas, each with a store as torchrun makes one, and return a status."""
    from torch.distributed import TCPStore
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=5000)
    stores = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(2)]
    replicas = []
    for replica, store in enumerate(stores):
        own = {
            "REPLICA_GROUP_ID": str(replica),
            "TORCHFT_LIGHTHOUSE": lighthouse.address(),
            "RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
        }
        replicas.append(subprocess.Popen([sys.executable, __file__, "--fault", fault], env=os.environ | own))
    try:
        return max(map(abs, [one.wait() for one in replicas]))
    finally:
        for one in replicas:
            one.kill()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fault", choices=NAMES, default="none")
    asked = parser.parse_args().fault
    if "REPLICA_GROUP_ID" in os.environ:
        train(int(os.environ["REPLICA_GROUP_ID"]), asked)
    else:
        sys.exit(main(asked))
