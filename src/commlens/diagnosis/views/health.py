"""The hardware of a node as a table: states, events, and sources that cannot be read."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from commlens.diagnosis.words.hardware import event_phrase
from commlens.model.health import THERMAL_REASONS, NodeHealth, Value
from commlens.text import capital, count, number, size

EVENTS_SHOWN: Final = 10


class HealthTable(NamedTuple):
    """A node's parts with their states, what happened, and what could not be read."""

    rows: list[tuple[str, str]]
    events: list[str]  # sentences, the newest first
    not_read: list[str]  # sentences


def health_table(health: NodeHealth) -> HealthTable:
    """Return the table of a node."""
    rows = [
        (f"{_NAMES.get(source, '')}{part} {values.get('name', '')}".strip(), state)
        for source, parts in health.values.items()
        for part, values in parts.items()
        if (state := _state(values))
    ]
    newest = sorted(health.events, key=lambda event: -event.at_ns)[:EVENTS_SHOWN]
    events = [
        f"{time.strftime('%Y-%m-%d %H:%M:%S UTC', time.gmtime(event.at_ns // 1_000_000_000))}:"
        f" {event_phrase(event)}."
        for event in newest
    ]
    not_read = [f"{capital(each.source)}: {each.reason}." for each in health.not_read]
    return HealthTable(rows, events, not_read)


_NAMES: Final = {"gpu": "GPU ", "nfs": "NFS server "}
_TEXTS: Final[Mapping[str, Callable[[float], str]]] = {
    "temperature_c": lambda value: f"{number(value)} °C",
    "power_w": lambda value: f"{value:.0f} W",
    "used_percent": lambda value: f"{number(value)} % used",
    "throttle_reasons": lambda value: (
        "its clock is lowered because of heat or power" if int(value) & THERMAL_REASONS else ""
    ),
    "pcie_width": lambda value: f"{number(value)} PCIe lanes",
    "rate_gbit": lambda value: f"{number(value)} Gbit/s",
    "speed": lambda value: f"{number(value / 1000)} Gbit/s" if value > 0 else "",
    "MemAvailable": lambda value: f"{size(value)} free",
    "MemTotal": lambda value: f"of {size(value)}",
    "memory_used": lambda value: f"{size(value)} of memory used",
    "memory_limit": lambda value: f"of {size(value)} allowed",
    "cpu_limit": lambda value: f"{number(round(value, 1))} CPUs allowed",
    "cpu_throttled_s": lambda value: (
        f"held back by that for {number(round(value, 1))} s since it was set" if value else ""
    ),
    "stalled_s": lambda value: (
        f"all processes waited for it for {number(round(value, 1))} s" if value else ""
    ),
    "throttled_times": lambda value: (
        f"its clock was lowered {count(int(value), 'time')}" if value else ""
    ),
}
"""The words for values, in the order in which they are shown."""

_COUNTERS: Final = {
    "ecc_uncorrected": "memory errors",
    "ecc_corrected": "corrected memory errors",
    "rows_remapped": "rows of memory replaced",
    "pages_retired": "pages of memory retired",
    "remap_failed": "rows of memory that could not be replaced",
    "symbol_error": "symbol errors",
    "link_error_recovery": "recoveries of the link",
    "link_downed": "times down",
    "port_rcv_errors": "receive errors",
    "port_rcv_remote_physical_errors": "receive errors of the other side",
    "local_link_integrity_errors": "integrity errors",
    "excessive_buffer_overrun_errors": "buffer overruns",
    "local_ack_timeout_err": "acknowledgements late",
    "packet_seq_err": "packets out of order",
    "rnr_nak_retry_err": "receiver-not-ready retries",
    "rx_errors": "receive errors",
    "tx_errors": "send errors",
    "rx_crc_errors": "checksum errors",
    "rx_dropped": "received packets dropped",
    "tx_dropped": "packets to send dropped",
    "segments": "segments sent",
    "retransmits": "sent again",
    "timeouts": "requests timed out",
    "sent_again": "requests sent again",
    "oom_kills": "processes killed for lack of memory",
}
"""The words for counters, which are shown unless they are 0."""


def _state(values: Mapping[str, Value]) -> str:
    known = {name: value for name, value in values.items() if isinstance(value, (int, float))}
    parts = [str(values["state"]).lower()] if "state" in values else []
    parts += [f"near {values['nic']}"] if values.get("nic") else []
    parts += [text(known[name]) for name, text in _TEXTS.items() if name in known]
    parts += [
        f"{text}: {number(known[name])}" for name, text in _COUNTERS.items() if known.get(name)
    ]
    return ", ".join(part for part in parts if part)
