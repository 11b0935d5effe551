"""The manifests in packaging/kubernetes against the schemas of their kinds. No cluster runs here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from clusters.daemons import wait_until
from commlens.launch.torchrun import EXIT_STATUSES
from conftest import REPOSITORY

pytestmark = pytest.mark.long

FOLDER = REPOSITORY / "packaging" / "kubernetes"


def manifest(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    return found


def validate(document: dict[str, Any]) -> None:
    """Fail on anything that the newest Kubernetes known here would refuse or ignore."""
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize("name", ["job", "attach"])
def test_kubernetes_accepts_the_manifest(name: str):
    validate(manifest(name))


def test_what_is_misspelt_is_refused():
    job = manifest("job")
    job["spec"]["podFailurePolicy"]["rules"][0]["onExitCode"] = {}
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    with pytest.raises(kubernetes_validate.ValidationError):
        validate(job)


def test_kubernetes_accepts_the_pods_of_the_training_operator():
    """The kind itself was checked by hand against its definition, which no package has."""
    spec = manifest("pytorchjob")["spec"]["pytorchReplicaSpecs"]["Worker"]
    template = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "train"}}
    validate({**template, "template": spec["template"]})


def test_the_trainer_accepts_its_job():
    models = pytest.importorskip("kubeflow_trainer_api.models")
    job = manifest("trainjob")
    # the package reads no quantities
    del job["spec"]["trainer"]["resourcesPerNode"]
    assert models.TrainerV1alpha1TrainJob.model_validate(job).to_dict() == job


def test_the_policy_ends_the_job_at_the_statuses_after_which_no_pod_should_follow():
    ends, _ = manifest("job")["spec"]["podFailurePolicy"]["rules"]
    statuses = [EXIT_STATUSES["exclude-node"], EXIT_STATUSES["stop"]]
    assert (ends["action"], ends["onExitCodes"]["values"]) == ("FailJob", statuses)
    [container] = manifest("job")["spec"]["template"]["spec"]["containers"]
    assert container["name"] == ends["onExitCodes"]["containerName"]
    assert "--exit-by-action" in container["command"]


@pytest.mark.parametrize("path", sorted(FOLDER.iterdir()), ids=lambda path: path.stem)
def test_the_docs_name_each_manifest(path: Path):
    assert f"packaging/kubernetes/{path.name}" in (REPOSITORY / "docs" / "clusters.md").read_text()


HANGS = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
for step in range(100):
    if step == 5 and dist.get_rank() == 1:
        open("stuck", "w").close()
        time.sleep(600)
    dist.all_reduce(torch.ones(4))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="Only root makes another file system for the ranks.")
def test_attach_sees_ranks_whose_files_it_does_not_see(tmp_path: Path):
    """As between two containers of a pod with shareProcessNamespace."""
    pytest.importorskip("torch")
    (tmp_path / "program.py").write_text(HANGS)
    venv = Path(sys.prefix)
    script = (
        f"mount -t tmpfs none /mnt && cp program.py /mnt/train.py && mkdir /mnt/venv && "
        f"mount --bind {venv} /mnt/venv && cd /mnt && exec /mnt/venv/bin/python -m "
        f"torch.distributed.run --standalone --nproc-per-node 2 train.py"
    )
    with (tmp_path / "out").open("wb") as out:
        job = subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", script],
            cwd=tmp_path,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        wait_until(lambda: Path(f"/proc/{job.pid}/root/mnt/stuck").exists(), "the stall", 60)
        assert not Path("/mnt/train.py").exists()
        attached = [sys.executable, "-m", "commlens", "attach", str(job.pid)]
        done = subprocess.run(attached, capture_output=True, text=True, check=False)
        said = " ".join(done.stdout.split())
        assert "VERDICT rank 1 is in train.py:7 <module>; rank 0 waits in all_reduce" in said
    finally:
        os.killpg(job.pid, signal.SIGTERM)
        job.wait(20)
