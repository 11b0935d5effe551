"""Reads a support bundle: files of the job's nodes, collected apart from the dumps.

The folder holds one folder for each host, named after it, or the files of the only host. Of each
host there is what its sources are on the node: a log of the kernel such as ``kern.log``, ``sys``,
``proc`` and the tables of nvidia-smi, as far as they were collected.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from commlens.health.gpus import PROCESSES_FILE, SMI_FILE
from commlens.health.kernel_log import LOG_FILES
from commlens.health.monitor import look_once
from commlens.model.health import NodeHealth
from commlens.model.topology import Inventory

SOURCES: Final = (*LOG_FILES, "sys", "proc", SMI_FILE, PROCESSES_FILE)

INVENTORIES: Final = (
    "topology.yaml",
    "topology.yml",
    "topology.json",
    "topology.conf",
    "topology.txt",
)
"""Beside the hosts' folders: an inventory, or Slurm's topology."""


def read_bundle(folder: Path, inventory: Inventory | None = None) -> list[NodeHealth]:
    """Return the hardware of each host; a host without a name is the only one.

    Args:
        folder: the bundle.
        inventory: where hosts are.
    """
    if _is_host(folder):
        found = look_once(folder, inventory=inventory)
        found.host = ""
        return [found]
    return [
        look_once(host, host.name, inventory)
        for host in sorted(folder.iterdir())
        if host.is_dir() and _is_host(host)
    ]


def inventory_file(folder: Path) -> Path | None:
    """Return the file of a bundle that says where its hosts are; None if there is none."""
    return next((folder / name for name in INVENTORIES if (folder / name).is_file()), None)


def _is_host(folder: Path) -> bool:
    return any((folder / name).exists() for name in SOURCES)
