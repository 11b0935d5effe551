"""Where a node is: its leaf switch and its rack, and the network adapter nearest to each GPU.

Adapters with the same place on all nodes form a rail, as their links usually lead to one switch.
The sources are an inventory of the user's, Slurm's topology, NCCL's topology file, and the PCI tree
in /sys.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import islice, takewhile
from operator import eq
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from commlens.errors import CommandError
from commlens.health.changes import Sources
from commlens.health.places import part_names
from commlens.health.sources import normal_address
from commlens.model.grouping import natural
from commlens.model.health import NodeHealth, gpus_by_index
from commlens.model.topology import HostPlace, Inventory, rail_of

TOPOLOGY_VARIABLES: Final = (
    "NCCL_TOPO_FILE",
    "NCCL_TOPO_DUMP_FILE",
    "SLURM_TOPOLOGY_ADDR",
    "SLURM_TOPOLOGY_ADDR_PATTERN",
)
_SIZE_MAX: Final = 16 << 20  # bytes of a file
_HOSTS_MAX: Final = 200_000  # of one list
_PARTS: Final = re.compile(r"(?:[^,\[]|\[[^\]]*\])+")
_SWITCH: Final = re.compile(
    r"^\s*(?:SwitchName|BlockName)=(\S+)(.*)$", re.IGNORECASE | re.MULTILINE
)
_SWITCHES: Final = re.compile(r"\bSwitches=[^\s(]", re.IGNORECASE)
_NODES: Final = re.compile(r"\bNodes=(\S+)", re.IGNORECASE)
_GPU_CLASSES: Final = ("0x0300", "0x0302")
_NIC_CLASSES: Final = ("0x0200", "0x0207")

_Path = tuple[str, ...]
"""A device's ancestors in the tree of PCI devices, the root first, and the device itself."""


class _InventoryFile(msgspec.Struct, forbid_unknown_fields=True):
    hosts: dict[str, HostPlace] = {}  # by a name, or one of Slurm's lists of names
    pattern: str = ""
    rails: list[str] = []


class NodeLayout(NamedTuple):
    """Where a node is, and which adapter is the nearest to each of its GPUs."""

    leaf: str = ""
    rack: str = ""
    nic_of_gpu: Mapping[str, str] = {}  # by PCI address

    def rail_of(self, gpu: str) -> str:
        """Return the number of a GPU's rail."""
        return rail_of(self.nic_of_gpu.get(gpu, ""), list(self.nic_of_gpu.values()))

    def add_to(self, health: NodeHealth) -> NodeHealth:
        """Return a node's health with its place, and with those of its ranks' adapters."""
        ranks = [
            msgspec.structs.replace(
                each, nic=self.nic_of_gpu.get(each.gpu, ""), rail=self.rail_of(each.gpu)
            )
            for each in health.ranks
        ]
        values = dict(health.values)
        if "gpu" in values and self.nic_of_gpu:
            values["gpu"] = {
                gpu: {**found, "nic": self.nic_of_gpu.get(gpu, "")}
                for gpu, found in values["gpu"].items()
            }
        return msgspec.structs.replace(
            health, ranks=ranks, values=values, leaf=self.leaf, rack=self.rack
        )


def find_layout(
    root: Path,
    host: str,
    environment: Mapping[str, str],
    sources: Sources,
    inventory: Inventory | None = None,
) -> NodeLayout:
    """Return where a node is. A source that cannot be read is ignored.

    Args:
        root: the folder below which the node's files are.
        host: its name.
        environment: of a rank.
        sources: the values of a look at the node.
        inventory: the user's.
    """
    listed = inventory.of(host) if inventory is not None else HostPlace()
    files = (environment.get(name, "") for name in TOPOLOGY_VARIABLES[:2])
    gpus = gpus_by_index(sources)
    found = (
        {gpus[index]: nic for index, nic in enumerate(listed.rails) if nic and index in gpus},
        *(_of_nccl(file, sources) for file in files),
        _of_pci_tree(root, sources),
    )
    return NodeLayout(
        listed.leaf or leaf_of_slurm(environment),
        listed.rack,
        next((each for each in found if each), {}),
    )


# --- inventories


def read_inventory(path: Path) -> Inventory:
    """Read an inventory in YAML or JSON, Slurm's topology.conf, or the output of ``scontrol show
    topology``.

    Raises:
        CommandError: it cannot be read.
    """
    import yaml  # only where there is an inventory

    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(_SIZE_MAX)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CommandError(f"The topology {path} cannot be read: {reason}.") from None
    if _SWITCH.search(text):
        return Inventory(
            {
                host: HostPlace(leaf=switch[1])
                for switch in _SWITCH.finditer(text)
                if (nodes := _NODES.search(switch[2])) and not _SWITCHES.search(switch[2])
                for host in hosts_in(nodes[1])
            }
        )
    try:
        found = msgspec.convert(yaml.safe_load(text) or {}, _InventoryFile)
        pattern = re.compile(found.pattern) if found.pattern else None
    except (yaml.YAMLError, msgspec.ValidationError, re.error, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise CommandError(f"The topology {path} cannot be understood: {reason}.") from None
    hosts = {
        host.partition(".")[0]: place
        for names, place in found.hosts.items()
        for host in hosts_in(names)
    }
    return Inventory(hosts, pattern, found.rails)


def leaf_of_slurm(environment: Mapping[str, str]) -> str:
    """Return the leaf that Slurm names to the processes of a job: ``spine.leaf7.n03`` with the
    pattern ``switch.switch.node``.
    """
    parts = environment.get("SLURM_TOPOLOGY_ADDR", "").split(".")
    kinds = environment.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").split(".")
    if len(parts) != len(kinds) or len(parts) < 2 or kinds[-1] != "node":
        return ""
    return parts[-2]


def hosts_in(names: str) -> list[str]:
    """Return the hosts of one of Slurm's lists: ``n[01-03,7],login``."""
    found = (host for part in _PARTS.findall(names) for host in _expanded(part))
    return list(islice(found, _HOSTS_MAX))


def _expanded(part: str) -> Iterator[str]:
    head, bracket, rest = part.partition("[")
    if not bracket:
        yield part
        return
    ranges, _, tail = rest.partition("]")
    for number in _numbers(ranges):
        for end in _expanded(tail):
            yield f"{head}{number}{end}"


def _numbers(ranges: str) -> list[str]:
    numbers: list[str] = []
    for each in ranges.split(","):
        first, _, last = each.partition("-")
        if first.isdecimal() and (last or first).isdecimal():
            until = min(int(last or first), int(first) + _HOSTS_MAX)
            numbers += [str(number).zfill(len(first)) for number in range(int(first), until + 1)]
    return numbers


# --- adapters


def _of_nccl(path: str, sources: Sources) -> dict[str, str]:
    """Return the adapter nearest to each GPU in a file of NCCL's topology."""
    from xml.etree import ElementTree  # only where there is such a file

    if not path:
        return {}
    try:
        with Path(path).open("rb") as file:
            root = ElementTree.fromstring(file.read(_SIZE_MAX))
    # LookupError, ValueError: of an encoding that the parser does not know
    except (OSError, ElementTree.ParseError, LookupError, ValueError, RecursionError):
        return {}
    gpus: dict[str, _Path] = {}
    nics: dict[str, _Path] = {}
    names = part_names(sources)
    for element, here in _elements(root):
        address = normal_address(here[-1]) if element.tag == "pci" else ""
        device_class = (element.get("class") or "") if address else ""
        if device_class.startswith(_GPU_CLASSES):
            gpus[address] = here
        elif device_class.startswith(_NIC_CLASSES):
            named = [net.get("name") for net in element.iter("net") if net.get("name")]
            nics |= dict.fromkeys(named or [names.get(address, "")], here)
    nics.pop("", None)
    return nearest(gpus, nics)


def _elements(root: Any) -> Iterator[tuple[Any, _Path]]:
    """Yield the elements below the root of NCCL's topology, each with its place in the tree."""
    waiting: list[tuple[Any, _Path]] = [(child, ()) for child in root]
    while waiting:
        element, above = waiting.pop()
        here = (*above, element.get("busid") or element.get("numaid") or element.tag)
        yield element, here
        waiting += [(child, here) for child in element]


def _of_pci_tree(root: Path, sources: Sources) -> dict[str, str]:
    """Return the adapter nearest to each GPU in the kernel's tree of PCI devices."""
    devices = root / "sys/bus/pci/devices"
    gpus = {address: _path_of(devices / address) for address in sources.get("gpu", {})}
    nics = {
        part: _path_of(devices / address)
        for part, values in sources.get("infiniband", {}).items()
        if isinstance(address := values.get("pci"), str) and "/" not in part
    }
    return nearest(
        {gpu: path for gpu, path in gpus.items() if path},
        {nic: path for nic, path in nics.items() if path},
    )


def _path_of(device: Path) -> _Path:
    try:
        target = str(device.readlink())
    except OSError:
        return ()
    return tuple(part for part in target.split("/") if part not in ("..", "devices", "sys"))


def nearest(gpus: Mapping[str, _Path], nics: Mapping[str, _Path]) -> dict[str, str]:
    """Return the adapter nearest to each GPU; nothing for a GPU that has several.

    As many GPUs as adapters below one switch have one each, in their order.
    """
    choices: dict[tuple[str, ...], list[str]] = {}
    for gpu, path in gpus.items():
        # how many ancestors they have in common
        shared = {nic: sum(takewhile(bool, map(eq, path, other))) for nic, other in nics.items()}
        most = max(shared.values(), default=0)
        if most:
            near = sorted((nic for nic, depth in shared.items() if depth == most), key=natural)
            choices.setdefault(tuple(near), []).append(gpu)
    found: dict[str, str] = {}
    for nearby, users in choices.items():
        if len(nearby) == 1:
            found |= dict.fromkeys(users, nearby[0])
        elif len(nearby) == len(users):
            found |= dict(zip(sorted(users), nearby, strict=True))
    return found
