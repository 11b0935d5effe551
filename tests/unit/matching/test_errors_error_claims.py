"""What the texts of errors say about ranks: whom they name, and who is to blame then."""

from __future__ import annotations

import pytest
from torch_errors import ddp, detail, tensor

from commlens.matching.errors import claim_of, names_backend, worker_end


@pytest.mark.parametrize(
    ("text", "about", "values"),
    [
        (detail(1, 0), "op", ((1, "broadcast"), (0, "reduce"))),
        (
            detail(1, 0, "ALLREDUCE", "ALLREDUCE", (tensor(2, "Float"), tensor(3, "Float"))),
            "shape",
            ((1, "[2]"), (0, "[3]")),
        ),
        (
            detail(1, 0, "ALLREDUCE", "ALLREDUCE", (tensor(2, "Float"), tensor(2, "Half"))),
            "dtype",
            ((1, "Float"), (0, "Half")),
        ),
        (ddp(0, 5, 2, 4), "parameters", ((0, "5 parameters"), (2, "4 parameters"))),
        (
            "RuntimeError: [1]: params[3] in this process with sizes [10, 20] appears not to match"
            " sizes of the same param in process 0.",
            "parameters",
            ((1, "params[3] of sizes [10, 20]"), (0, "params[3] of other sizes")),
        ),
    ],
)
def test_ranks_that_differ(text: str, about: str, values: object) -> None:
    claim = claim_of(text)
    assert claim is not None and (claim.about, claim.own, claim.values) == (
        about,
        values[0][0],
        values,
    )  # type: ignore[index]


def test_other_texts_name_nobody() -> None:
    assert claim_of("ValueError: rank 3 has 4 params") is None and claim_of(None) is None
    assert (
        worker_end("RuntimeError: DataLoader worker (pid 4711) is killed by signal: Killed.")
        == "is killed by signal: Killed"
    )
    assert (
        worker_end("RuntimeError: DataLoader worker (pid(s) 47, 48) exited unexpectedly")
        == "exited unexpectedly"
    )
    assert names_backend(
        "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by"
        " peer [127.0.0.1]:3"
    )
    assert not names_backend("ConnectionResetError: [Errno 104] Connection reset by peer")
