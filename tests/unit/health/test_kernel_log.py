"""The kernel's log: what its lines tell, and when."""

from __future__ import annotations

import os
import shutil
import socket
import time
from pathlib import Path

import pytest

from commlens.health import kernel_log
from commlens.health.kernel_log import KernelLog, event_of, events_in, time_of
from commlens.health.sources import UnreadableError

NOON = 1_790_251_391  # 2026-09-24 12:03:11 UTC


@pytest.mark.parametrize(
    ("line", "what", "fault", "part"),
    [
        (
            ("NVRM: Xid (PCI:0000:4F:00): 79, pid=4121, name=python, GPU has fallen off the bus."),
            "xid",
            "gpu-fault",
            "0000:4f:00.0",
        ),
        (
            "NVRM: Xid (PCI:0000:4f:00): 48, pid='<unknown>', name=<unknown>, DBE",
            "xid",
            "gpu-memory",
            "0000:4f:00.0",
        ),
        (
            "NVRM: Xid (0000:01:00): 31, Ch 0000000b, engmask 00000120",
            "xid",
            "gpu-fault",
            "0000:01:00.0",
        ),
        (
            "nvidia-nvswitch3: SXid (PCI:0000:c5:00.0): 20034, Fatal, Link 30 LTSSM Fault Up",
            "nvswitch-error",
            "gpu-fault",
            "0000:c5:00.0",
        ),
        (
            "NVRM: GPU 0000:4f:00.0: GPU has fallen off the bus.",
            "gpu-gone",
            "gpu-fault",
            "0000:4f:00.0",
        ),
        (
            "pcieport 0000:3a:00.0: PCIe Bus Error: severity=Corrected, type=Physical Layer",
            "pcie-error-corrected",
            "pcie",
            "0000:3a:00.0",
        ),
        (
            "nvidia 0000:4f:00.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction",
            "pcie-error",
            "pcie",
            "0000:4f:00.0",
        ),
        (
            "pcieport 0000:3a:00.0: AER: Uncorrected (Fatal) error received: 0000:4f:00.0",
            "pcie-error",
            "pcie",
            "0000:4f:00.0",
        ),
        (
            "EDAC MC0: 1 CE memory read error on CPU_SrcID#0_MC#0_Chan#1_DIMM#0",
            "memory-error-corrected",
            "host-memory",
            "memory",
        ),
        ("EDAC MC1: 1 UE memory read error", "memory-error", "host-memory", "memory"),
        (
            "Memory failure: 0x3f5c12: Sending SIGBUS to python:4121 due to hardware memory"
            " corruption",
            "memory-error",
            "host-memory",
            "memory",
        ),
        (
            "mce: [Hardware Error]: CPU 3: Machine Check Exception: 5 Bank 9",
            "machine-check",
            "host-memory",
            "cpu",
        ),
        (
            "mce: [Hardware Error]: CPU 3: Machine Check: 0 Bank 5: be00000000800400",
            "machine-check",
            "host-memory",
            "cpu",
        ),
        (
            "mlx5_core 0000:17:00.0 ens1f0np0: Link down",
            "link-down",
            "network-down",
            "0000:17:00.0",
        ),
        ("mlx5_core 0000:17:00.0 ens1f0np0: Link up", "link-up", "network-down", "0000:17:00.0"),
        (
            "mlx5_core 0000:17:00.0: Port module event: module 0, Cable unplugged",
            "adapter-error",
            "network-errors",
            "0000:17:00.0",
        ),
        (
            "mlx5_core 0000:17:00.0: poll_health:835:(pid 0): device's health compromised",
            "adapter-error",
            "network-errors",
            "0000:17:00.0",
        ),
        ("bnxt_en 0000:01:00.0 eno1: NIC Link is Down", "link-down", "network-down", "eno1"),
        ("ixgbe 0000:01:00.0 eth2: NIC Link is Up 10 Gbps", "link-up", "network-down", "eth2"),
        (
            "bond0: link status definitely down for interface eth1, disabling it",
            "link-down",
            "network-down",
            "eth1",
        ),
        (
            "NETDEV WATCHDOG: eth0 (bnxt_en): transmit queue 3 timed out",
            "adapter-error",
            "network-errors",
            "eth0",
        ),
        ("nfs: server 10.0.0.9 not responding, still trying", "nfs-silent", "storage", "10.0.0.9"),
        ("nfs: server 10.0.0.9 OK", "nfs-back", "storage", "10.0.0.9"),
        (
            "INFO: task python:4121 blocked for more than 120 seconds.",
            "hung-task",
            "storage",
            "disk",
        ),
        (
            "EXT4-fs error (device nvme0n1p2): ext4_find_entry:1455: inode #2: comm python",
            "io-error",
            "storage",
            "disk",
        ),
        (
            'XFS (nvme1n1): metadata I/O error in "xfs_buf_ioend" at daddr 0x2 len 1 error 5',
            "io-error",
            "storage",
            "disk",
        ),
        ("EXT4-fs (sda1): Remounting filesystem read-only", "io-error", "storage", "disk"),
        ("ceph: mds0 hung", "nfs-silent", "storage", "mds0"),
        ("ceph: mds0 came back", "nfs-back", "storage", "mds0"),
        (
            "ceph: [3a6c5a1e-6f1d-4a0c-9d5e-0a1b2c3d4e5f 4127]: mds1 hung",
            "nfs-silent",
            "storage",
            "mds1",
        ),
        (
            "blk_update_request: I/O error, dev nvme0n1, sector 2048 op 0x0:(READ)",
            "io-error",
            "storage",
            "nvme0n1",
        ),
        ("nvme nvme0: I/O 12 QID 3 timeout, aborting", "io-error", "storage", "disk"),
        (
            "CPU3: Core temperature is above threshold, cpu clock is throttled",
            "cpu-throttled",
            "thermal",
            "cpu",
        ),
        (
            "amdgpu 0000:03:00.0: amdgpu: GPU reset begin!",
            "gpu-reset",
            "gpu-fault",
            "0000:03:00.0",
        ),
    ],
)
def test_a_message_is_recognised(line: str, what: str, fault: str, part: str) -> None:
    event = event_of(line, NOON)
    assert event is not None
    assert (event.what, event.fault, event.part, event.at_ns) == (what, fault, part, NOON)


def test_the_process_is_taken_from_a_message() -> None:
    xid = event_of("NVRM: Xid (PCI:0000:4f:00): 79, pid=4121, name=python, off the bus", NOON)
    assert xid is not None and (xid.number, xid.pid) == (79, 4121)
    killed = event_of(
        "Out of memory: Killed process 77 (stress-ng) total-vm:8388608kB, anon-rss:8000000kB", NOON
    )
    assert killed is not None and (killed.what, killed.pid, killed.name) == (
        "oom-kill",
        77,
        "stress-ng",
    )
    bad = event_of(
        "Memory failure: 0x3f5c12: Sending SIGBUS to pt_main_thread:4121 due to hardware memory"
        " corruption",
        NOON,
    )
    assert bad is not None and (bad.pid, bad.name) == (4121, "pt_main_thread")


@pytest.mark.parametrize(
    "line",
    [
        "usb 1-1: new high-speed USB device number 2",
        "NVRM: loading NVIDIA UNIX x86_64 Kernel Module  550.54.15",
        "nvidia-nvswitch3: SXid (PCI:0000:c5:00.0): 12028, Non-fatal, Link 32 egress",
        "IPv6: ADDRCONF(NETDEV_CHANGE): eth0: link becomes ready",
        "mlx5_core 0000:17:00.0: Port module event: module 0, Cable plugged",
        "EDAC MC: Ver: 3.0.0",
        "Memory failure: 0x3f5c12: recovery action for dirty LRU page: Recovered",
        "mce: [Hardware Error]: Machine check events logged",
        # corrected errors: of bank 7 of an Intel CPU, and of bank 17 of an AMD one
        "mce: [Hardware Error]: CPU 3: Machine Check: 0 Bank 7: 8c00004000010090",
        "mce: [Hardware Error]: CPU 16: Machine Check: 0 Bank 17: dc2040000000011b",
    ],
)
def test_other_messages_are_left_out(line: str) -> None:
    assert event_of(line, NOON) is None


@pytest.mark.parametrize(
    ("line", "nanoseconds"),
    [
        ("1790251391.500000 n03 kernel: text", 500_000_000),
        ("2026-09-24T12:03:11.250000+00:00 n03 kernel: text", 250_000_000),
        ("2026-09-24T14:03:11.25+0200 n03 kernel: text", 250_000_000),
        ("2026-09-24T12:03:11,25Z text", 250_000_000),
    ],
)
def test_the_time_of_a_line(line: str, nanoseconds: int) -> None:
    assert time_of(line, NOON) == NOON * 1_000_000_000 + nanoseconds


def test_times_without_year_and_zone_are_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    at_ns = NOON * 1_000_000_000
    assert time_of("[Thu Sep 24 12:03:11 2026] NVRM: Xid", NOON) == at_ns
    assert time_of("Sep 24 12:03:11 n03 kernel: text", NOON) == at_ns
    # a line of December that is read in January is of the former year
    january = NOON + 110 * 86400
    assert time_of("Dec 31 12:03:11 n03 kernel: text", january) < january * 1_000_000_000
    assert time_of("no time here", NOON) == time_of("Foo 99 99:99:99 n03", NOON) == 0


def test_lines_without_a_time_are_left_out() -> None:
    assert events_in(["NVRM: Xid (PCI:0000:4f:00): 79, pid=1, name=python"]) == []


def test_a_file_is_read_on_from_its_end(tmp_path: Path) -> None:
    file = tmp_path / "var" / "log" / "kern.log"
    file.parent.mkdir(parents=True)
    file.write_text("1790251391.500000 n03 kernel: NVRM: Xid (PCI:0000:4f:00): 63, pid=1, remap\n")
    log, all_of_it = KernelLog(tmp_path), KernelLog(tmp_path, past=True)
    try:
        assert [event.number for event in all_of_it.read_new()] == [63]
        assert log.read_new() == []
        with file.open("a") as more:
            more.write("1790251392.500000 n03 kernel: NVRM: Xid (PCI:0000:4f:00): 79, ")
            more.flush()
            assert log.read_new() == []  # the line is not complete
            more.write("pid=1, bus\n")
        assert [event.number for event in log.read_new()] == [79]
        assert log.read_new() == []
    finally:
        log.close()
        all_of_it.close()


@pytest.mark.parametrize("is_replaced", [True, False])
def test_a_file_is_read_on_after_log_rotation(tmp_path: Path, is_replaced: bool) -> None:
    line = "179025139{}.500000 n03 kernel: NVRM: Xid (PCI:0000:4f:00): {}, pid=1, text\n"
    file = tmp_path / "kern.log"
    file.write_text(line.format(0, 63) + line.format(1, 63))
    log = KernelLog(tmp_path)
    try:
        if is_replaced:
            with file.open("a") as more:
                more.write(line.format(2, 48))
            file.rename(tmp_path / "kern.log.1")
            assert [event.number for event in log.read_new()] == [48]  # there is no new one yet
        file.write_text(line.format(3, 79))
        assert [event.number for event in log.read_new()] == [79]
        assert log.read_new() == []
    finally:
        log.close()


def test_what_a_damaged_journal_still_gives_is_read(tmp_path: Path) -> None:
    program = tmp_path / "journalctl"
    program.write_text("#!/bin/sh\necho 1700000000.5 node kernel: one line\nexit 1\n")
    program.chmod(0o755)
    lines = kernel_log._journal_lines(str(program), "@0")
    assert lines == ["1700000000.5 node kernel: one line"]


def test_a_file_is_read_where_neither_the_device_nor_the_journal_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "kern.log"
    file.write_text("1790251391.500000 n03 kernel: NVRM: Xid (PCI:0000:4f:00): 63, pid=1, remap\n")
    monkeypatch.setattr(kernel_log, "KMSG", str(tmp_path / "kmsg"))
    monkeypatch.setattr(kernel_log, "LOG_FILES", (str(file),))
    monkeypatch.setattr(shutil, "which", lambda _: None)
    log = KernelLog(past=True)
    try:
        assert [event.number for event in log.read_new()] == [63]
    finally:
        log.close()


def test_without_a_log_it_is_told_what_would_help(tmp_path: Path) -> None:
    with pytest.raises(UnreadableError, match="kern.log"):
        KernelLog(tmp_path)


def test_a_message_is_not_older_than_the_last_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel's clock of its messages drifts: here by half the time since the boot."""
    (tmp_path / "kmsg").touch()
    monkeypatch.setattr(kernel_log, "KMSG", str(tmp_path / "kmsg"))
    began_ns = time.time_ns()
    log = KernelLog()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    os.close(log._kmsg)
    log._kmsg = ours.detach()
    try:
        for drift in (-0.5, 0.5):
            told_us = int(time.monotonic_ns() // 1000 * (1 + drift))
            theirs.send(f"4,1,{told_us},-;nfs: server a not responding\n".encode())
        found = [event.at_ns for event in log.read_new()]
        assert began_ns <= found[0] <= found[1] <= time.time_ns()
    finally:
        log.close()
        theirs.close()
