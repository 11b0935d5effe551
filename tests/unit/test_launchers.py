"""The environment variables of launchers, in one table."""

from __future__ import annotations

import pytest

from commlens import launchers


@pytest.mark.parametrize("launcher", launchers.LAUNCHERS, ids=lambda launcher: launcher.sign)
def test_each_launcher_places_its_ranks(launcher: launchers.Launcher) -> None:
    environ = {launcher.sign: "7", launcher.rank: "3"}
    if launcher.world_size:
        environ[launcher.world_size] = "8"
    if launcher.local_rank:
        environ[launcher.local_rank] = "1"
    assert launchers.launcher_of(environ) == launcher.name
    assert launchers.number(environ, launchers.RANK) == 3
    assert launchers.number(environ, launchers.WORLD_SIZE, 8) == 8
    assert launchers.number(environ, launchers.LOCAL_RANK, 1) == 1
    assert launchers.without_rank({**environ, "PATH": "/bin"}).keys() <= {
        "PATH",
        "TORCHELASTIC_RUN_ID",
    }


def test_torchrun_decides_where_srun_started_it() -> None:
    environ = {"TORCHELASTIC_RUN_ID": "x", "SLURM_PROCID": "1", "RANK": "5", "LOCAL_RANK": "1"}
    assert launchers.launcher_of(environ) == "torchrun"
    assert launchers.number(environ, launchers.RANK) == 5
    assert launchers.ranks_of_node({**environ, "LOCAL_WORLD_SIZE": "4"}, 5) == range(4, 8)


@pytest.mark.parametrize(
    "of_mpi",
    [
        {
            "OMPI_COMM_WORLD_RANK": "3",
            "OMPI_COMM_WORLD_SIZE": "4",
            "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        },
        {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1"},
    ],
    ids=["Open MPI", "MPICH"],
)
def test_mpirun_decides_in_the_batch_script_of_a_slurm_job(of_mpi: dict[str, str]) -> None:
    """The script is task 0 of 1, and mpirun's ranks inherit that."""
    environ = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0"} | of_mpi
    assert launchers.launcher_of(environ) == "mpirun"
    assert launchers.number(environ, launchers.RANK) == 3
    assert launchers.number(environ, launchers.WORLD_SIZE, 0) == 4
    assert launchers.number(environ, launchers.LOCAL_RANK) == 1


def test_srun_decides_where_it_offers_pmi() -> None:
    environ = {"SLURM_PROCID": "2", "SLURM_NTASKS": "4", "PMI_RANK": "2", "PMIX_RANK": "2"}
    assert launchers.launcher_of(environ) == "srun"


def test_a_variable_that_holds_no_number_is_as_good_as_none() -> None:
    assert launchers.number({"RANK": "", "PMI_RANK": "2"}, launchers.RANK) == 2
    assert launchers.number({"RANK": "-1"}, launchers.RANK) == -1
    assert not launchers.ranks_of_node({"LOCAL_WORLD_SIZE": "4"}, 5)
    assert not launchers.ranks_of_node({"LOCAL_RANK": "1"}, 5)


@pytest.mark.parametrize(
    ("command", "replica", "name"),
    [
        (b"ray::Trainer.setup\0", "", "Trainer"),
        (b"ray::IDLE\0", "3", "replica 3"),
        (b"python\0train.py\0", "", ""),
    ],
)
def test_the_name_of_a_program_that_gives_none(command: bytes, replica: str, name: str) -> None:
    assert launchers.world_of({"REPLICA_GROUP_ID": replica}, command) == name


WORKER = "/env/lib/python3.11/site-packages/ray/_private/workers/default_worker.py"


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        ([WORKER, "--node-manager-port=38411", "--startup-token=3"], [WORKER]),
        (["train.py", "--lr=1"], ["train.py", "--lr=1"]),
        ([], []),
    ],
)
def test_a_worker_of_ray_is_known_without_its_session(argv: list[str], command: list[str]) -> None:
    assert launchers.command_of(argv) == command
