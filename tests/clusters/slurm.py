"""A Slurm cluster on this machine: munged, slurmctld, and a slurmd for each of two nodes."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from clusters import daemons
from clusters.daemons import PATIENCE_S, Daemons, free_ports, wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "scancel")
NODES = ("n1", "n2")

# A job that is requeued waits for as long as a step's credential lasts: two minutes by default.
_CONF = """
ClusterName=commlens
SlurmctldHost={host}
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=75
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
    missing = daemons.why_not(PROGRAMS, "slurm-wlm munge")
    return missing or (None if os.geteuid() == 0 else "Slurm's daemons need root here.")


class Slurm:
    """A running cluster.

    Args:
        folder: holds all its files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environ = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons = Daemons(folder, self.environ)

    def start(self) -> None:
        """Start the daemons, and wait until all nodes are idle."""
        folder, host = self.folder, socket.gethostname()
        (folder / "state").mkdir(parents=True)
        folder.chmod(0o755)
        port, first, second = free_ports(3)
        conf = _CONF.format(folder=folder, host=host, port=port, first=first, second=second)
        (folder / "slurm.conf").write_text(conf)
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        self._daemons.start(
            "munged", "--foreground", "--force", f"--socket={folder}/munge.socket",
            f"--key-file={key}", f"--pid-file={folder}/munged.pid",
            f"--log-file={folder}/munged.log", f"--seed-file={folder}/munge.seed",
        )  # fmt: skip
        wait_until(lambda: (folder / "munge.socket").exists(), "munged")
        self._daemons.start("slurmctld", "-D", "-i")
        for node in NODES:
            self._daemons.start("slurmd", "-D", "-N", node)
        wait_until(self._all_idle, "slurmd")

    def _all_idle(self) -> bool:
        states = self.run("sinfo", "-h", "-N", "-o", "%N %t", check=False).split()
        return states.count("idle") >= len(NODES)

    def run(
        self, *command: str, check: bool = True, cwd: Path | None = None, **environ: str
    ) -> str:
        """Run a command of Slurm. Returns what it prints."""
        done = subprocess.run(
            command,
            env={**self.environ, **environ},
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert not check or done.returncode == 0, done.stderr
        return done.stdout

    def submit(self, script: Path, *options: str, **environ: str) -> str:
        """Submit a batch script from its own folder. Returns the job's id."""
        command = ("sbatch", "--parsable", *options, str(script))
        return self.run(*command, cwd=script.parent, **environ).strip()

    def state_of(self, job: str) -> dict[str, str]:
        """Return what Slurm knows of a job, by its own names."""
        shown = self.run("scontrol", "show", "job", job, "-o")
        return dict(part.split("=", 1) for part in shown.split() if "=" in part)

    def wait_for_end(self, job: str, timeout_s: float = 2 * PATIENCE_S) -> dict[str, str]:
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
        self._daemons.close()


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[Slurm]:
    """Run a cluster in this folder."""
    made = Slurm(folder)
    try:
        made.start()
        yield made
    finally:
        made.close()
