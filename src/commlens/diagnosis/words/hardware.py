"""Words about what the hardware of nodes did, and about NCCL's RAS service: "On n03, mlx5_1 went
down at 10:00:03 UTC, 2.0 s before the last rank came to it".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from commlens.diagnosis.words.finding import Words
from commlens.model.cause import (
    Cause,
    Dead,
    Hardware,
    Missing,
    OfHardware,
    PlaceKind,
    RasWitness,
    SharedPlace,
    Straggler,
    StuckInside,
)
from commlens.model.health import Fault, HealthEvent, What
from commlens.model.xids import xid
from commlens.text import (
    capital,
    count,
    duration,
    naming_alike,
    number,
    ranks_and_verb,
    ranks_phrase,
    size,
    utc,
)

_SHOWN = 4
_PAGE_BYTES = 4096  # of nearly every machine
_PART_NAMES = {"memory": "its memory", "disk": "its storage", "cpu": "its CPU", "tcp": "TCP"}


def event_phrase(event: HealthEvent) -> str:
    """``"mlx5_1 went down"``, ``"GPU 0000:4f:00.0 reported Xid 79 (it fell off the bus)"``."""
    return _EVENTS[event.what](event)


def _gpu(event: HealthEvent) -> str:
    return f"GPU {event.part}"


def _xid(event: HealthEvent) -> str:
    usually = ", usually by a fault of the program" if xid(event.number).effect == "program" else ""
    return f"{_gpu(event)} reported Xid {event.number} ({xid(event.number).meaning}{usually})"


def _killed(event: HealthEvent) -> str:
    named = f" {event.name}" if event.name and event.name != "oom_kills" else ""
    pid = f" (pid {event.pid})" if event.pid else ""
    subject = f"process{named}{pid}" if named or pid else "a process"
    return f"the kernel's OOM killer ended {subject}"


def _rose(event: HealthEvent) -> str:
    """``"symbol error of mlx5_1 rose from 12 to 340"``."""
    subject = f"{event.name.replace('_', ' ')} of {_PART_NAMES.get(event.part, event.part)}"
    return f"{subject} rose from {_value(event.before)} to {_value(event.after)}"


def _is_silent(event: HealthEvent) -> str:
    until = ", for a while" if event.over else ""
    return f"the file server {event.part} did not respond{until}"


def _rise(event: HealthEvent) -> float:
    """Return by how much a value rose; 0 if that is not known."""
    before, after = event.before, event.after
    return after - before if isinstance(before, float) and isinstance(after, float) else 0.0


def _stalled(what: str) -> Callable[[HealthEvent], str]:
    def phrase(event: HealthEvent) -> str:
        waited = f" for {duration(_rise(event) * 1e9)}" if _rise(event) else ""
        return f"all processes waited for {what}{waited}"

    return phrase


def _swapped(event: HealthEvent) -> str:
    return f"{size(_rise(event) * _PAGE_BYTES)} of memory were read back from swap space"


def _clock_was_set(event: HealthEvent) -> str:
    by = event.after if isinstance(event.after, float) else 0.0
    return f"its clock was set {duration(abs(by) * 1e9)} {'forward' if by > 0 else 'back'}"


def _value(value: float | str) -> str:
    return value if isinstance(value, str) else number(value)


_EVENTS: Mapping[What, Callable[[HealthEvent], str]] = {
    "xid": _xid,
    "nvswitch-error": lambda event: f"the NVSwitch {event.part} reported a fatal error",
    "gpu-gone": lambda event: f"{_gpu(event)} was lost: the driver does not reach it any more",
    "gpu-reset": lambda event: f"{_gpu(event)} was reset by its driver",
    "ecc-uncorrected": lambda event: (
        f"the memory of {_gpu(event)} had errors that cannot be corrected"
    ),
    "ecc-corrected": lambda event: f"the memory of {_gpu(event)} had many errors, all corrected",
    "rows-remapped": lambda event: f"bad rows of the memory of {_gpu(event)} were replaced",
    "gpu-throttled": lambda event: f"{_gpu(event)} lowered its clock because of heat or power",
    "pcie-error": lambda event: f"PCIe device {event.part} had an error that cannot be corrected",
    "pcie-error-corrected": lambda event: f"PCIe device {event.part} had errors, all corrected",
    "pcie-width-fell": lambda event: (
        f"{_gpu(event)} uses {_value(event.after)} PCIe lanes instead of {_value(event.before)}"
    ),
    "memory-error": lambda _: "its memory had an error that cannot be corrected",
    "memory-error-corrected": lambda _: "its memory had errors, all corrected",
    "machine-check": lambda _: "its CPU reported a hardware error (machine check)",
    "oom-kill": _killed,
    "memory-pressure": _stalled("memory"),
    "link-down": (
        lambda event: f"{event.part} went down{' and came up again' if event.over else ''}"
    ),
    "link-up": lambda event: f"{event.part} came up",
    "rate-fell": lambda event: (
        f"the rate of {event.part} fell from {_value(event.before)} to {_value(event.after)}"
    ),
    "adapter-error": lambda event: f"the driver reported an error of {event.part}",
    "errors-rose": _rose,
    "drops-rose": _rose,
    "retransmits-rose": _rose,
    "nfs-silent": _is_silent,
    "nfs-back": lambda event: f"the file server {event.part} responded again",
    "io-error": lambda _: "a read or write of its storage failed",
    "io-pressure": _stalled("storage"),
    "hung-task": (
        lambda event: (
            f"the kernel reported that {event.name} (pid {event.pid}) hangs,"
            " as in a read of storage"
        )
    ),
    "cpu-throttled": lambda _: "its CPU lowered its clock because of heat",
    "swapping": _swapped,
    "clock-step": _clock_was_set,
}

_NEXT: Mapping[Fault, str] = {
    "gpu-fault": "take {node} out of the job and test its GPUs (nvidia-smi -q, dcgmi diag -r 3)",
    "gpu-memory": (
        "take {node} out of the job; reset the GPU, and have it replaced if the error comes back"
        " (nvidia-smi -q -d ECC,ROW_REMAPPER)"
    ),
    "thermal": "look at the cooling and the power of {node} (nvidia-smi -q -d PERFORMANCE)",
    "pcie": "reseat or replace the device on {node} (lspci -vv, dmesg)",
    "network-down": (
        "look at {part} on {node}: its cable, its port and the switch behind it (ibstat, ethtool,"
        " dmesg)"
    ),
    "network-errors": "look at {part} on {node}: its cable and its port (perfquery, ethtool -S)",
    "storage": "look at the storage that {node} uses: mounts, servers, dmesg",
    "host-memory": "look at the memory of {node}: what else runs there, and its limits (dmesg)",
    "clock": "look at the time service of {node} (chronyc tracking, timedatectl)",
}


_KERNEL_STEP = (
    "look for an illegal access in the program's kernels (compute-sanitizer,"
    " CUDA_LAUNCH_BLOCKING=1)"
)
_GPU_STEP = "if it only happens on this GPU, test {node}"
_MOMENTS: Mapping[type[Cause], str] = {
    StuckInside: "the last rank came to it",
    Missing: "the first rank waited",
    Dead: "the end",
}
"""The moment with which the time of a change is compared, by the kind of cause."""

_LOOK = "this look"
"""The same where nothing tells when the fault began: the moment at which commlens looked at the
job.
"""


def add_hardware(words: Words, cause: Cause) -> Words:
    """Return the words of a finding with what the hardware did then, and what RAS says."""
    if not isinstance(cause, OfHardware):
        return words
    # The sentences name the ranks on a node, without those elsewhere that are in the same state.
    with naming_alike(frozenset):
        return _with_hardware(words, cause)


def _with_hardware(words: Words, cause: OfHardware) -> Words:
    moment = _MOMENTS.get(type(cause), _LOOK)
    if any(each.before == "look" for each in cause.hardware):
        moment = _LOOK
    shown = [_sentence(each, moment) for each in cause.hardware[:_SHOWN]]
    witness = [ras_sentence(cause.ras)] if cause.ras is not None else []
    if cause.place is not None:
        said = f"{words.explanation} {place_sentence(cause.place)}".lstrip()
        words = words._replace(explanation=said)
    first = cause.hardware[0] if cause.hardware else None
    if isinstance(cause, Straggler) and first is not None and first.explains:
        words = words._replace(explanation=f"{words.explanation} {shown.pop(0)}")
    words = words._replace(evidence=[*words.evidence, *shown, *witness])
    if first is None or not first.explains:
        return words
    if not isinstance(cause, (Straggler, StuckInside)):
        step = next_step(first, finds_kernel=words.finds_kernel)
        return words._replace(next_step=f"{words.next_step}; {step}".lstrip("; "))
    if cause.why != first.event.fault:
        return words  # the processes show another reason
    words = words._replace(next_step=next_step(first))
    return words if isinstance(cause, Straggler) else _of_stuck(words, cause, first, moment)


def _of_stuck(words: Words, cause: StuckInside, first: Hardware, moment: str) -> Words:
    return words._replace(
        summary=f"{words.summary}; {_places(cause.hardware)}, {_moment_phrase(first, moment)}",
        would_raise_confidence=(
            "That it happened at the time does not prove that it was the cause; a second"
            " occurrence would, or a test of the hardware."
        ),
    )


def next_step(hardware: Hardware, *, finds_kernel: bool = False) -> str:
    """Return what to do about a change of hardware. With ``finds_kernel``, the finding already
    tells how to find the program's kernel that failed.
    """
    event = hardware.event
    step = _NEXT[event.fault]
    if event.what == "xid" and xid(event.number).effect == "program":
        step = _GPU_STEP if finds_kernel else f"{_KERNEL_STEP}; {_GPU_STEP}"
    return step.format(node=hardware.node, part=event.part)


def _places(found: Sequence[Hardware]) -> str:
    """``"on n03, mlx5_1 went down"``, with the other nodes where the same happened."""
    first = found[0]
    others = sorted(
        {
            each.node
            for each in found[1:]
            if each.explains and each.event.what == first.event.what and each.node != first.node
        }
    )
    also = f" (and likewise on {', '.join(others)})" if others else ""
    return f"on {first.node}, {event_phrase(first.event)}{also}"


def _moment_phrase(hardware: Hardware, moment: str) -> str:
    """``"2.0 s before the end"``, ``"not earlier than 10 s before the end"``."""
    early = "not earlier than " if hardware.event.since_ns else ""
    gap = duration(abs(hardware.before_s) * 1e9)
    return f"{early}{gap} {'before' if hardware.before_s >= 0 else 'after'} {moment}"


def _sentence(hardware: Hardware, moment: str) -> str:
    event = hardware.event
    times = f", {count(hardware.times, 'time')}" if hardware.times > 1 else ""
    clock = utc(event.at_ns)
    at = f"by {clock}" if event.since_ns else f"at {clock}"
    perhaps = "" if hardware.explains else "; that may be a coincidence"
    return (
        f"On {hardware.node}, {event_phrase(event)} {at}{times}, {_moment_phrase(hardware, moment)}"
        f" ({_ranks_clause(hardware)}){perhaps}."
    )


def _ranks_clause(hardware: Hardware) -> str:
    """``"rank 7 uses it"``, ``"ranks 2-3 are there"``."""
    if hardware.event.what == "swapping":
        return f"memory of {ranks_phrase(hardware.ranks)} is there"
    if hardware.own:
        return f"{ranks_and_verb(hardware.ranks, 'uses', 'use')} it"
    return f"{ranks_and_verb(hardware.ranks, 'is', 'are')} there"


def ras_sentence(ras: RasWitness) -> str:
    """Return what NCCL's RAS service says, and whether it agrees."""
    told = []
    if ras.behind:
        have = ranks_and_verb(ras.behind, "has", "have")
        told.append(f"{have} launched fewer {ras.op} operations than the others")
    if ras.not_answering:
        told.append(f"{ranks_and_verb(ras.not_answering, 'does', 'do')} not answer it")
    if not told:
        told.append("it sees no difference between the ranks")
    verdict = {
        "agrees": "NCCL's RAS service agrees",
        "disagrees": "NCCL's RAS service disagrees",
        "silent": "NCCL's RAS service names no rank",
    }[ras.says]
    wrong = " Either it or this verdict is wrong." if ras.says == "disagrees" else ""
    return f"{verdict}: {'; '.join(told)}.{wrong}"


_CHANCE = 0.05
"""What is likelier than this by chance is called a possible coincidence."""

_IN: Mapping[PlaceKind, str] = {
    "host": "on {name}",
    "leaf": "on the switch {name}",
    "rack": "in the rack {name}",
    "rail": "on rail {name}",
    "gpu": "on GPU {name} of their hosts",
}


def place_sentence(place: SharedPlace) -> str:
    """``"Ranks 3-27:8 are all on rail 3 (mlx5_3), and none of the other 28 ranks is."``"""
    all_of = "both" if len(place.ranks) == 2 else "all"
    where = _IN[place.kind].format(name=place.name) + (f" ({place.nic})" if place.nic else "")
    others = (
        "the other rank is not"
        if place.others == 1
        else (f"none of the other {place.others} ranks is")
    )
    perhaps = "; that may be a coincidence" if place.chance > _CHANCE else ""
    return f"{capital(ranks_phrase(place.ranks))} are {all_of} {where}, and {others}{perhaps}."
