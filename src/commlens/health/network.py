"""The state and the counters of InfiniBand ports and network interfaces, and of TCP."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from commlens.health.sources import folders, number, pci_address, word
from commlens.model.health import Value, Values

PORT_COUNTERS: Final = (
    "symbol_error",
    "link_error_recovery",
    "link_downed",
    "port_rcv_errors",
    "port_rcv_remote_physical_errors",
    "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
    "port_xmit_wait",
)
HARDWARE_COUNTERS: Final = ("local_ack_timeout_err", "packet_seq_err", "rnr_nak_retry_err")
INTERFACE_COUNTERS: Final = (
    "rx_errors",
    "tx_errors",
    "rx_crc_errors",
    "rx_dropped",
    "tx_dropped",
)
_SNMP: Final = {"RetransSegs": "retransmits", "OutSegs": "segments"}


def read_infiniband(root: Path) -> Values:
    """Return the state and counters of each InfiniBand port, also of RoCE adapters.

    A part is named ``mlx5_0``, or ``mlx5_0/2`` for a second port.
    """
    values: Values = {}
    for device in folders(root / "sys/class/infiniband"):
        ports = folders(device / "ports")
        for port in ports:
            part = device.name if port.name == "1" else f"{device.name}/{port.name}"
            found: dict[str, Value] = {
                "state": word(port / "state").partition(": ")[2],
                "physical": word(port / "phys_state").partition(": ")[2],
                "layer": word(port / "link_layer"),
                "pci": pci_address(device / "device"),
            }
            if (rate := number(port / "rate")) is not None:
                found["rate_gbit"] = rate
            for folder, names in (
                ("counters", PORT_COUNTERS),
                ("hw_counters", HARDWARE_COUNTERS),
            ):
                found |= _numbers(port / folder, names)
            values[part] = {name: value for name, value in found.items() if value != ""}
    return values


def read_interfaces(root: Path) -> Values:
    """Return the state and counters of each network interface but the loopback and those that
    belong to containers and bridges.
    """
    values: Values = {}
    for interface in folders(root / "sys/class/net"):
        # a virtual interface has no device; those of containers come and go
        if interface.name == "lo" or not (interface / "device").exists():
            continue
        found: dict[str, Value] = {
            "state": word(interface / "operstate"),
            "pci": pci_address(interface / "device"),
        }
        found |= _numbers(interface, ("carrier_down_count", "speed"))
        found |= _numbers(interface / "statistics", INTERFACE_COUNTERS)
        values[interface.name] = {name: value for name, value in found.items() if value != ""}
    return values


def read_tcp(root: Path) -> Values:
    """Return the node's counters of TCP segments sent, and sent again."""
    lines = word(root / "proc/net/snmp").splitlines()
    names_and_counts = [line.split() for line in lines if line.startswith("Tcp:")][:2]
    counts = dict(zip(*names_and_counts, strict=False)) if len(names_and_counts) == 2 else {}
    found: dict[str, Value] = {
        ours: float(counts[theirs])
        for theirs, ours in _SNMP.items()
        if counts.get(theirs, "").isdecimal()
    }
    return {"tcp": found} if found else {}


def _numbers(folder: Path, names: tuple[str, ...]) -> dict[str, Value]:
    read = ((name, number(folder / name)) for name in names)
    return {name: value for name, value in read if value is not None}
