"""The environment variables by which launchers and schedulers place a process in its job. Standard
library only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple


class Launcher(NamedTuple):
    """The variables that a launcher sets for each process; empty where it has none."""

    name: str
    sign: str  # that it started a process
    rank: str
    world_size: str = ""
    local_rank: str = ""


_WORKER_OF_RAY: Final = "ray/_private/workers/default_worker.py"

REPLICA: Final = "REPLICA_GROUP_ID"
"""The number of a replica group, each of which is a job of its own: set by torchft's launcher."""

# The first that is set wins. torchrun comes first: another launcher may have started it. The batch
# script of a Slurm job is a task, too, so its variables say "task 0" in all ranks that an
# mpirun in it starts; but srun sets variables of PMI itself, so it comes before these.
LAUNCHERS: Final = (
    Launcher("torchrun", "TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "LOCAL_RANK"),
    Launcher(
        "mpirun",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
    ),
    # MPICH and Intel MPI
    Launcher("mpirun", "MPI_LOCALRANKID", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    Launcher("srun", "SLURM_PROCID", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    Launcher(
        "jsrun",
        "JSM_NAMESPACE_RANK",
        "JSM_NAMESPACE_RANK",
        "JSM_NAMESPACE_SIZE",
        "JSM_NAMESPACE_LOCAL_RANK",
    ),
    Launcher("flux", "FLUX_TASK_RANK", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID"),
    Launcher("mpirun", "PMIX_RANK", "PMIX_RANK"),
    Launcher("mpirun", "PMI_RANK", "PMI_RANK", "PMI_SIZE"),
    Launcher(
        "mpirun",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
    ),
    Launcher("mpiexec", "PALS_RANKID", "PALS_RANKID", "", "PALS_LOCAL_RANKID"),
)

RANK: Final = tuple(launcher.rank for launcher in LAUNCHERS)
WORLD_SIZE: Final = tuple(filter(None, (launcher.world_size for launcher in LAUNCHERS)))
LOCAL_RANK: Final = tuple(filter(None, (launcher.local_rank for launcher in LAUNCHERS)))
LOCAL_WORLD_SIZE: Final = "LOCAL_WORLD_SIZE"  # of torchrun: the ranks on one node are consecutive

AGENT_STORE: Final = "TORCHELASTIC_USE_AGENT_STORE"
"""With ``True``, torch makes no store for ``tcp://`` and ``env://``: every rank is a client of the
launcher's (torch 1.9 to 2.15).
"""

# The same on all ranks of one start of a program, and another one at the next start.
STARTS: Final = (
    "SLURM_STEP_ID",
    "OMPI_MCA_ess_base_jobid",
    "PMIX_NAMESPACE",
    "PMI_JOBID",
    "PALS_APID",
    "FLUX_JOB_ID",
    "TORCHELASTIC_RUN_ID",
)
# The same on all ranks, but several programs may run there, one after the other or at once.
PLACES: Final = ("SLURM_JOB_ID", "LSB_JOBID", "PBS_JOBID", "MASTER_ADDR", "MASTER_PORT")
# By which a person calls a job.
JOB_NAMES: Final = (
    "TORCHELASTIC_RUN_ID",
    "SLURM_JOB_ID",
    "SLURM_JOB_NAME",
    "PBS_JOBID",
    "LSB_JOBID",
    "FLUX_JOB_ID",
    "JOB_NAME",
)


def number(environ: Mapping[str, str], names: Iterable[str], default: int = -1) -> int:
    """Return the first of these variables that holds a number from 0 on."""
    return next(
        (int(environ[name]) for name in names if environ.get(name, "").isdecimal()), default
    )


def world_of(environ: Mapping[str, str], command: bytes) -> str:
    """Return the name that a program has without being given one: of a replica group that a
    launcher has numbered, or the class of an actor of Ray, which is the process's title; "" if it
    is neither.
    """
    if replica := environ.get(REPLICA, ""):
        return f"replica {replica[:40]}"
    actor = re.match(rb"ray::(\w+)", command)
    return actor[1].decode() if actor is not None else ""


def command_of(argv: Sequence[str]) -> Sequence[str]:
    """Return the command by which a program is known, from ``sys.argv``: of Ray's worker, without
    the ports and folders of its session, which are others after each start.
    """
    return argv[:1] if argv and argv[0].endswith(_WORKER_OF_RAY) else argv


def launcher_of(environ: Mapping[str, str]) -> str:
    """Return the launcher that made a process a rank; empty if its environment shows none.

    Accelerate uses torchrun's.
    """
    return next((launcher.name for launcher in LAUNCHERS if environ.get(launcher.sign)), "")


def ranks_of_node(environ: Mapping[str, str], rank: int) -> range:
    """Return the ranks on the node of a rank with this environment; empty if it does not say."""
    local, size = number(environ, LOCAL_RANK), number(environ, [LOCAL_WORLD_SIZE], 0)
    return range(rank - local, rank - local + size) if local >= 0 else range(0)


def without_rank(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variables that make a program a rank."""
    own = {*RANK, *WORLD_SIZE, *LOCAL_RANK, LOCAL_WORLD_SIZE}
    return {name: value for name, value in environ.items() if name not in own}
