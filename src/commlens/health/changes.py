"""The changes on a node between two looks: events, made from differences of values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import msgspec

from commlens.model.health import THERMAL_REASONS, Fault, HealthEvent, Value, Values, What

Sources = Mapping[str, Values]
"""The values of a look, by source."""

WORKING: Final = {"infiniband": "ACTIVE", "network": "up"}
"""By source: the state of a network part that works."""


class Look(NamedTuple):
    """The values of all sources at one time."""

    taken_ns: int  # Unix ns
    values: Sources
    clock_ns: int = 0  # how far Unix time is ahead of the time since the boot; 0: unknown


class Rule(NamedTuple):
    """A change of a value that is a sign of a fault."""

    source: str  # "host/memory": only that part of a source whose parts use the same names
    name: str
    what: What
    fault: Fault
    is_sign: Callable[[_HealthChange], bool]


class _HealthChange(NamedTuple):
    before: Value
    after: Value
    seconds: float  # between both
    usual_per_s: float  # its rise in a second before that; 0: unknown, or it did not rise

    @property
    def rise(self) -> float:
        """By how much a counter rose; 0 if it is none, or was reset."""
        if isinstance(self.before, str) or isinstance(self.after, str):
            return 0.0
        return max(0.0, self.after - self.before)


_UNUSUAL: Final = 5.0
"""A counter that always rises is evidence only if it rises so many times faster than before."""


def _rose(least: float) -> Callable[[_HealthChange], bool]:
    def is_sign(change: _HealthChange) -> bool:
        unusual = _UNUSUAL * change.usual_per_s * change.seconds
        return change.rise >= least and change.rise > unusual

    return is_sign


def _rose_by_share(least: float) -> Callable[[_HealthChange], bool]:
    """Return a condition: a counter of seconds rose by a second or more, and by this share of the
    time between both looks.
    """
    return lambda change: change.rise >= max(1.0, least * change.seconds)


def _fell(change: _HealthChange) -> bool:
    known = isinstance(change.before, float) and isinstance(change.after, float)
    # 0: not known, as the rate of a port that is down
    return known and 0 < change.after < change.before  # type: ignore[operator]


def _has_left(good: str) -> Callable[[_HealthChange], bool]:
    return lambda change: change.before == good and change.after != good


def _is_hot(value: Value) -> bool:
    return isinstance(value, float) and bool(int(value) & THERMAL_REASONS)


# The least rises are chosen, not measured: what healthy nodes count now and then stays below them.
RULES: Final = [
    Rule("infiniband", "state", "link-down", "network-down", _has_left(WORKING["infiniband"])),
    Rule("infiniband", "link_downed", "link-down", "network-down", _rose(1)),
    Rule("infiniband", "rate_gbit", "rate-fell", "network-errors", _fell),
    *(
        Rule("infiniband", name, "errors-rose", "network-errors", _rose(least))
        for name, least in (
            ("symbol_error", 10),
            ("link_error_recovery", 1),
            ("port_rcv_errors", 10),
            ("port_rcv_remote_physical_errors", 10),
            ("local_link_integrity_errors", 1),
            ("excessive_buffer_overrun_errors", 1),
            ("local_ack_timeout_err", 10),
            ("packet_seq_err", 100),
            ("rnr_nak_retry_err", 10),
        )
    ),
    Rule("network", "state", "link-down", "network-down", _has_left(WORKING["network"])),
    Rule("network", "carrier_down_count", "link-down", "network-down", _rose(1)),
    Rule("network", "speed", "rate-fell", "network-errors", _fell),
    *(
        Rule("network", name, "errors-rose", "network-errors", _rose(10))
        for name in ("rx_errors", "tx_errors", "rx_crc_errors")
    ),
    *(
        Rule("network", name, "drops-rose", "network-errors", _rose(1000))
        for name in ("rx_dropped", "tx_dropped")
    ),
    Rule("tcp", "retransmits", "retransmits-rose", "network-errors", _rose(100)),
    Rule("gpu", "ecc_uncorrected", "ecc-uncorrected", "gpu-memory", _rose(1)),
    Rule("gpu", "pages_retired", "rows-remapped", "gpu-memory", _rose(1)),
    Rule("gpu", "rows_remapped", "rows-remapped", "gpu-memory", _rose(1)),
    Rule("gpu", "remap_failed", "rows-remapped", "gpu-memory", _rose(1)),
    Rule("gpu", "ecc_corrected", "ecc-corrected", "gpu-memory", _rose(100)),
    Rule(
        "gpu",
        "throttle_reasons",
        "gpu-throttled",
        "thermal",
        lambda change: _is_hot(change.after) and not _is_hot(change.before),
    ),
    Rule("gpu", "pcie_width", "pcie-width-fell", "pcie", _fell),
    Rule("nfs", "timeouts", "nfs-silent", "storage", _rose(1)),
    Rule("host/memory", "oom_kills", "oom-kill", "host-memory", _rose(1)),
    Rule("host/memory", "pages_in", "swapping", "host-memory", _rose(5000)),
    Rule("host/memory", "stalled_s", "memory-pressure", "host-memory", _rose_by_share(0.2)),
    Rule("host/disk", "stalled_s", "io-pressure", "storage", _rose_by_share(0.5)),
    Rule("host/cpu", "throttled_times", "cpu-throttled", "thermal", _rose(10)),
]


def changes(first: Look, before: Look, after: Look) -> list[HealthEvent]:
    """Return the events between two looks.

    Args:
        first: an earlier look, or the same as ``before``: it shows what is usual.
        before: the look after which it happened.
        after: the look that shows it.
    """
    # the driver does not list these any more
    found = [
        HealthEvent(
            what="gpu-gone",
            fault="gpu-fault",
            part=part,
            at_ns=after.taken_ns,
            since_ns=before.taken_ns,
        )
        for part in before.values.get("gpu", {})
        if "gpu" in after.values and part not in after.values["gpu"]
    ]
    for rule in RULES:
        source, _, only = rule.source.partition("/")
        for part, values in after.values.get(source, {}).items():
            old = before.values.get(source, {}).get(part, {})
            if rule.name not in values or rule.name not in old or only not in ("", part):
                continue
            change = _HealthChange(
                old[rule.name],
                values[rule.name],
                (after.taken_ns - before.taken_ns) / 1e9,
                _usual(first, before, source, part, rule.name),
            )
            if rule.is_sign(change):
                found.append(
                    HealthEvent(
                        what=rule.what,
                        fault=rule.fault,
                        part=part,
                        at_ns=after.taken_ns,
                        since_ns=before.taken_ns,
                        name=rule.name,
                        before=change.before,
                        after=change.after,
                    )
                )
    return found


def _usual(first: Look, before: Look, source: str, part: str, name: str) -> float:
    """Return by how much a counter rose in a second between two earlier looks."""
    seconds = (before.taken_ns - first.taken_ns) / 1e9
    old = first.values.get(source, {}).get(part, {}).get(name)
    new = before.values.get(source, {}).get(part, {}).get(name)
    if seconds <= 0 or not isinstance(old, float) or not isinstance(new, float):
        return 0.0
    return max(0.0, new - old) / seconds


CLOCK_STEP_NS: Final = 500_000_000
"""A clock that is corrected slowly moves less than that between two looks."""


def clock_step(before: Look, after: Look) -> int:
    """Return by how much the clock was set forward between two looks, in ns; 0 if it was not."""
    step = after.clock_ns - before.clock_ns if before.clock_ns and after.clock_ns else 0
    return step if abs(step) >= CLOCK_STEP_NS else 0


def shifted(event: HealthEvent, by_ns: int) -> HealthEvent:
    """Return an event with its times on a clock that was set since."""
    since_ns = event.since_ns + by_ns if event.since_ns else 0
    return msgspec.structs.replace(event, at_ns=event.at_ns + by_ns, since_ns=since_ns)


def is_down(values: Sources, part: str) -> bool | None:
    """Return whether a network part is down at a look; None if it is unknown."""
    for source, good in WORKING.items():
        state = values.get(source, {}).get(part, {}).get("state")
        if state is not None:
            return state != good
    return None
