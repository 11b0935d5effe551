"""Nodes on one machine: each has a network namespace, a host name and a folder of black boxes of
its own.

Where there is no ``ip netns``, or no right to use it, a node only has a folder of black boxes of
its own, on the loopback interface.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forked_python import inside
from zygote_client import Zygote

PORT = 29511
BRIDGE = "clbr0"


def _ip(*arguments: str) -> bool:
    return (
        subprocess.run(["ip", *arguments], capture_output=True, timeout=20, check=False).returncode
        == 0
    )


@dataclass
class Node:
    """One node: where a command runs, and what the commands that were started on it printed."""

    number: int
    folder: Path
    isolated: bool  # has a network namespace
    subnet: int = 99
    zygote: Zygote | None = None  # forks the Pythons that are started here
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def namespace(self) -> str:
        """The network namespace."""
        return f"cl{os.getpid()}s{self.subnet}n{self.number}"

    @property
    def address(self) -> str:
        """The IP address that the other nodes reach."""
        return f"10.{self.subnet}.0.{self.number + 1}" if self.isolated else "127.0.0.1"

    @property
    def box_dir(self) -> Path:
        """The folder of its black boxes."""
        return self.folder / "box"

    @property
    def log(self) -> Path:
        """The output of its commands."""
        return self.folder / "log"

    def start(
        self, command: Sequence[str], environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        """Start a command on this node."""
        self.box_dir.mkdir(parents=True, exist_ok=True)
        options: dict[str, Any] = {
            "stdin": subprocess.DEVNULL,
            "cwd": self.folder,
            "start_new_session": True,
            "env": {
                **os.environ,
                "GLOO_SOCKET_IFNAME": "eth0" if self.isolated else "lo",
                "OMP_NUM_THREADS": "1",
                "TORCH_CPP_LOG_LEVEL": "ERROR",
                "COMMLENS_BOX_DIR": str(self.box_dir),
                **environment,
            },
        }
        with self.log.open("ab") as log:
            options |= {"stdout": log, "stderr": log}
            if self.zygote is None:
                process = subprocess.Popen([*inside(self._place), *command], **options)
            else:
                process = self.zygote.popen(command, enters=self._place, **options)
        self.processes.append(process)
        return process

    @property
    def _place(self) -> tuple[str, str] | None:
        return (self.namespace, f"node{self.number}") if self.isolated else None

    def pull_the_cable(self) -> None:
        """Cut the node off from the others."""
        assert _ip("-n", self.namespace, "link", "set", "eth0", "down")

    def pids(self, text: str = "") -> list[int]:
        """Return the processes on this node, or those with this text in their command lines; none
        without a network namespace.
        """
        listed = subprocess.run(
            ["ip", "netns", "pids", self.namespace], capture_output=True, text=True, check=False
        )
        found = []
        for pid in listed.stdout.split() if self.isolated else []:
            with contextlib.suppress(OSError):
                if text.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(int(pid))
        return found

    def kill(self) -> None:
        """Kill everything that was started on this node."""
        pids = self.pids()
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.processes:
            process.wait(10)

    @property
    def output(self) -> str:
        """What its commands have printed so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""


@contextlib.contextmanager
def nodes(
    count: int, folder: Path, zygote: Zygote | None = None, *, subnet: int = 99
) -> Iterator[list[Node]]:
    """Make nodes that reach each other, and end everything that runs on them. Sets of nodes at one
    time need different subnets. With a zygote, the Pythons that are started there are its forks.
    """
    hub = f"cl{os.getpid()}s{subnet}hub"
    isolated = _ip("netns", "add", hub) and _ip("-n", hub, "link", "add", BRIDGE, "type", "bridge")
    made = [
        Node(number, folder / f"node{number}", isolated, subnet, zygote) for number in range(count)
    ]
    try:
        for node in made:
            node.folder.mkdir(parents=True, exist_ok=True)
            if isolated:
                _connect(node, hub)
        if isolated:
            _ip("-n", hub, "link", "set", BRIDGE, "up")
        yield made
    finally:
        for node in made:
            node.kill()
            _ip("netns", "del", node.namespace)
        _ip("netns", "del", hub)


def _connect(node: Node, hub: str) -> None:
    port = f"port{node.number}"
    assert _ip("netns", "add", node.namespace)
    assert _ip(
        "link",
        "add",
        "eth0",
        "netns",
        node.namespace,
        "type",
        "veth",
        "peer",
        "name",
        port,
        "netns",
        hub,
    )
    _ip("-n", hub, "link", "set", port, "master", BRIDGE, "up")
    _ip("-n", node.namespace, "addr", "add", f"{node.address}/24", "dev", "eth0")
    _ip("-n", node.namespace, "link", "set", "eth0", "up")
    _ip("-n", node.namespace, "link", "set", "lo", "up")


def launch(
    made: Sequence[Node],
    program: Sequence[str],
    *,
    per_node: int = 2,
    options: Sequence[str] = (),
    **settings: str,
) -> None:
    """Start ``commlens launch`` on every node."""
    for node in made:
        node.start(
            [
                sys.executable,
                "-m",
                "commlens",
                "launch",
                f"--nnodes={len(made)}",
                f"--node-rank={node.number}",
                f"--nproc-per-node={per_node}",
                f"--master-addr={made[0].address}",
                f"--master-port={PORT}",
                *options,
                *program,
            ],
            {"COMMLENS_DUMP_DIR": str(node.folder / "dump"), **settings},
        )


def wait(made: Sequence[Node], timeout_s: float) -> list[int | None]:
    """Wait until all commands have ended. Returns the exit status of each node's last command;
    None: it still runs.
    """
    end = time.monotonic() + timeout_s
    for node in made:
        for process in node.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, end - time.monotonic()))
    return [node.processes[-1].poll() for node in made]
