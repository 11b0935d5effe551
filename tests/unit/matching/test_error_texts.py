"""What errors of torch and its backends are about, by their texts."""

from __future__ import annotations

import pytest

from commlens.matching.error_texts import (
    consequence_of,
    distance_to_cause,
    is_closed_connection,
    is_memory_of_others,
    is_mismatch_error,
    is_peer_error,
    is_refusal,
    is_timeout,
    may_be_peer_error,
)

CLOSED = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:42"
TIMED_OUT = "RuntimeError: [unbound_buffer.cc:78] Timed out waiting 60000ms for recv operation"
REFUSED = "commlens.errors.DistributedOperationException: Cannot apply desired operation"


@pytest.mark.parametrize(
    ("text", "peer", "closed", "timeout"),
    [
        (CLOSED, True, True, False),
        (TIMED_OUT, True, False, True),
        ("KeyboardInterrupt:", True, False, False),
        ("ncclRemoteError: A call failed possibly due to a network error", True, False, False),
        ("ValueError: loss is not finite", False, False, False),
        ("", False, False, False),
        (None, False, False, False),
    ],
)
def test_errors_because_of_another_rank(
    text: str | None, peer: bool, closed: bool, timeout: bool
) -> None:
    assert (is_peer_error(text), is_closed_connection(text), is_timeout(text)) == (
        peer,
        closed,
        timeout,
    )
    assert may_be_peer_error(text or "") is peer


def test_consequences_by_how_near_the_cause_they_are() -> None:
    nearer = (
        "ValueError: loss is not finite",
        "NCCL error: internal error - please report this issue to the NCCL developers",
        CLOSED,
        "RuntimeError: NCCL Async Error: remote process exited or there was a network error",
        TIMED_OUT,
        "RuntimeError: NCCL communicator was aborted after a previous error",
    )
    assert [distance_to_cause(text) for text in nearer] == [0, 1, 2, 3, 4, 5]
    assert (
        consequence_of(f"{nearer[1]}\nLast error:\nSocket recv failed while polling") == "network"
    )


def test_what_may_be_about_a_peer_is_wider() -> None:
    assert may_be_peer_error("the remote end was reset") and not is_peer_error("the remote end")


def test_a_mismatch_that_a_backend_noticed() -> None:
    assert is_mismatch_error(
        "[enforce fail at pair.cc:446] op.preamble.length <= op.nbytes. 8 vs 4"
    )
    assert not is_mismatch_error(TIMED_OUT) and not is_mismatch_error(None)


OWN = "Of the allocated memory 37.10 GiB is allocated by PyTorch, and 512.00 MiB is reserved by PyTorch"


@pytest.mark.parametrize(
    ("used", "of_others"),
    [
        ({"this process": "3.40", "Process 7": "74.12"}, True),
        ({"this process": "74.12", "Process 7": "3.40"}, False),
        ({"Process 7": "39.52"}, False),  # in a container, it is the one that got none
        ({"Process 7": "39.52", "Process 8": "0.50"}, False),
        ({"Process 7": "38.00", "Process 8": "41.00"}, True),
        ({"Process 7": "0.50", "Process 8": "0.60"}, False),
        ({}, False),
    ],
)
def test_the_memory_of_other_processes(used: dict[str, str], of_others: bool) -> None:
    said = "".join(f"{name} has {size} GiB memory in use. " for name, size in used.items())
    assert is_memory_of_others(f"CUDA out of memory. {said}{OWN}") == of_others
    if "this process" not in used:
        assert not is_memory_of_others(f"CUDA out of memory. {said}")


def test_only_the_type_of_an_exception_makes_it_a_refusal() -> None:
    assert is_refusal(REFUSED)
    assert not is_refusal("ValueError: saw DistributedOperationException") and not is_refusal(None)
