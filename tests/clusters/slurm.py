"""A Slurm cluster on this machine: munged, slurmctld, and a slurmd for each of two nodes."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "scancel")
NODES = ("n1", "n2")
_UP_WITHIN_S = 40.0

_CONF = """
ClusterName=commlens
SlurmctldHost={host}
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=5
InactiveLimit=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdLogFile={folder}/slurmd.%n.log
SlurmctldLogFile={folder}/slurmctld.log
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=8 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=8 State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 MaxTime=INFINITE State=UP
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE State=UP
"""


def why_not() -> str | None:
    """Return why there can be no cluster here, in a sentence; None if there can."""
    missing = [name for name in PROGRAMS if _path_of(name) is None]
    if missing:
        return f"{', '.join(missing)} is not installed (Debian: apt install slurm-wlm munge)."
    return None if os.geteuid() == 0 else "Slurm's daemons need root here."


def _path_of(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


class Slurm:
    """A running cluster.

    Args:
        folder: holds all its files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environ = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start the daemons, and wait until all nodes are idle."""
        folder, host = self.folder, socket.gethostname()
        (folder / "state").mkdir(parents=True)
        folder.chmod(0o755)
        port, first, second = _free_ports(3)
        conf = _CONF.format(folder=folder, host=host, port=port, first=first, second=second)
        (folder / "slurm.conf").write_text(conf)
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        self._run_daemon(
            "munged", "--foreground", "--force", f"--socket={folder}/munge.socket",
            f"--key-file={key}", f"--pid-file={folder}/munged.pid",
            f"--log-file={folder}/munged.log", f"--seed-file={folder}/munge.seed",
        )  # fmt: skip
        _wait_for(lambda: (folder / "munge.socket").exists(), "munged")
        self._run_daemon("slurmctld", "-D", "-i")
        for node in NODES:
            self._run_daemon("slurmd", "-D", "-N", node)
        _wait_for(self._all_idle, "slurmd")

    def _run_daemon(self, name: str, *options: str) -> None:
        path = _path_of(name)
        assert path is not None
        with (self.folder / f"{name}-{len(self._daemons)}.out").open("wb") as out:
            self._daemons.append(
                subprocess.Popen(
                    [path, *options],
                    env=self.environ,
                    stdout=out,
                    stderr=out,
                    stdin=subprocess.DEVNULL,
                )
            )

    def _all_idle(self) -> bool:
        states = self.run("sinfo", "-h", "-N", "-o", "%N %t", check=False).split()
        return states.count("idle") >= len(NODES)

    def run(self, *command: str, check: bool = True, **environ: str) -> str:
        """Run a command of Slurm. Returns what it prints."""
        done = subprocess.run(
            command,
            env={**self.environ, **environ},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert not check or done.returncode == 0, done.stderr
        return done.stdout

    def submit(self, script: Path, *options: str, **environ: str) -> str:
        """Submit a batch script. Returns the job's id."""
        return self.run("sbatch", "--parsable", *options, str(script), **environ).strip()

    def state_of(self, job: str) -> dict[str, str]:
        """Return what Slurm knows of a job, by its own names."""
        shown = self.run("scontrol", "show", "job", job, "-o")
        return dict(part.split("=", 1) for part in shown.split() if "=" in part)

    def wait_for_end(self, job: str, timeout_s: float = 120.0) -> dict[str, str]:
        """Wait until a job has ended. Returns what Slurm knows of it."""
        until = time.monotonic() + timeout_s
        while (state := self.state_of(job))["JobState"] in (
            "PENDING",
            "RUNNING",
            "COMPLETING",
            "CONFIGURING",
        ):
            assert time.monotonic() < until, state
            time.sleep(0.3)
        return state

    def close(self) -> None:
        """End all jobs and daemons."""
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired, OSError):
            self.run("scancel", "--user=root", check=False)
            time.sleep(1.0)
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[Slurm]:
    """Run a cluster in this folder."""
    made = Slurm(folder)
    try:
        made.start()
        yield made
    finally:
        made.close()


def _wait_for(is_there: Callable[[], bool], name: str) -> None:
    until = time.monotonic() + _UP_WITHIN_S
    while not is_there():
        assert time.monotonic() < until, f"{name} did not start."
        time.sleep(0.2)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
