"""Stand-ins for srun and mpirun: each starts the tasks of one node with the environment variables
of the real launcher.

python cluster_launchers.py srun NODE NODES TASKS_PER_NODE COMMAND...
python cluster_launchers.py mpirun NODE NODES TASKS_PER_NODE COMMAND...
"""

from __future__ import annotations

import os
import subprocess
import sys

NAMES = {
    "srun": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NNODES"),
    "mpirun": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_NODE_RANK",
        "OMPI_MCA_num_nodes",
    ),
}
MORE = {
    "srun": {"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_JOB_NODELIST": "node[0-1]"},
    "mpirun": {"OMPI_MCA_ess_base_jobid": "123456", "PMIX_NAMESPACE": "prterun-node0-77@1"},
}


def main() -> int:
    """Start the tasks, wait for all of them, and return the highest exit status."""
    launcher, node, nodes, tasks = sys.argv[1], *map(int, sys.argv[2:5])
    processes = []
    for local in range(tasks):
        values = (
            node * tasks + local,
            nodes * tasks,
            local,
            node if launcher == "srun" else local,
            nodes,
        )
        environment = dict(zip(NAMES[launcher], map(str, values), strict=True)) | MORE[launcher]
        processes.append(subprocess.Popen(sys.argv[5:], env={**os.environ, **environment}))
    return max(abs(process.wait()) for process in processes)


if __name__ == "__main__":
    sys.exit(main())
