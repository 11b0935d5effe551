"""A stand-in for Ray, see tests/past_torch/README.md."""

import os


class RuntimeContext:
    gcs_address = "127.0.0.1:6379"

    def get_job_id(self):
        return os.environ["PAST_TORCH_DIR"]


def get_runtime_context():
    return RuntimeContext()
