"""All scenarios: those of ``commlens demo``, and those that only tests and benchmarks run.

``python -m more_scenarios NAME``, with this folder's parent on the path, is one worker of any of them.
"""

from __future__ import annotations

from commlens.scenarios import registry
from commlens.scenarios.registry import DISAGREES, SKIPPED, Ending, truth_of, without_fsdp2
from more_scenarios import throttle


def Scenario(*arguments: object, **more: object) -> registry.Scenario:
    return registry.Scenario(*arguments, **more, package=__name__)  # type: ignore[arg-type]


# fmt: off
SCENARIOS: tuple[registry.Scenario, ...] = (
    *registry.SCENARIOS,
    Scenario(
        "throttled", "a noisy neighbour leaves one rank 1% of a core", "throttled", "plain", Ending.HANGS,
        truth_of("missing waiting", "throttled", "all_reduce"), impossible=throttle.why_not),
    Scenario(
        "mesh-cascade", "one rank of a mesh deadlocks on its own lock; the wait spreads from its row to all ranks", "mesh", "2-d",
        Ending.HANGS, truth_of("missing", "user-code", "all_reduce"), worlds=(4, 8)),
    Scenario(
        "uneven-then-idle", "one rank has less data and then waits for a file", "uneven", "plain", Ending.HANGS,
        truth_of("missing", "user-code", "all_reduce")),
    Scenario(
        "absent-at-start", "one rank never comes to init_process_group", "startup", "startup", Ending.HANGS,
        truth_of("missing", "data-loading user-code", "init_process_group"), worlds=(4,), at_start=True),
    Scenario(
        "new-group-order", "one rank makes two groups in reverse order", "startup", "startup", Ending.HANGS,
        truth_of("mismatch/group", "skipped initialising", "new_group"), worlds=(4,), at_start=True),
    Scenario(
        "mesh-shape", "one rank makes a device mesh of another shape", "startup", "startup", Ending.HANGS,
        truth_of("mismatch/group", "initialising", "init_device_mesh"), worlds=(4,), at_start=True),
    Scenario(
        "unanswered-key", "the other ranks wait for a key in the store that one rank does not write this time", "startup", "startup",
        Ending.HANGS, truth_of("missing", "skipped", "store.get"), worlds=(4,)),
    Scenario(
        "uneven-then-barrier", "one rank has less data and waits in the barrier at the end", "uneven", "plain", Ending.HANGS,
        truth_of("mismatch/op missing", SKIPPED, "all_reduce barrier")),
    Scenario(
        "ddp-skip-backward", "DDP: one rank skips a backward pass", "ddp", "ddp", Ending.HANGS,
        truth_of("mismatch/op missing", SKIPPED, "all_reduce all_gather")),
    Scenario(
        "fsdp2-forward-order", "FSDP2: one rank runs two blocks in reverse order", "fsdp2", "fsdp2", Ending.DIES,
        truth_of("mismatch/shape", f"{DISAGREES} skipped", "all_gather"), impossible=without_fsdp2),
    Scenario(
        "pipeline-lost-send", "one stage of a pipeline does not send a gradient", "pipeline", "pipeline", Ending.HANGS,
        truth_of("missing cycle mismatch/p2p", SKIPPED, "recv send")),
    Scenario(
        "swap-three-groups", "a deadlock through three groups of two", "overlapping", "subgroups", Ending.HANGS,
        truth_of("cycle", SKIPPED, "all_reduce"), worlds=(4, 8)),
    Scenario(
        "recv-without-send", "one rank waits for a message that no rank sends", "point_to_point", "p2p", Ending.HANGS,
        truth_of("cycle missing mismatch/p2p", SKIPPED, "recv")),
    Scenario(
        "both-recv", "both ranks of a pair receive first", "point_to_point", "p2p", Ending.HANGS,
        truth_of("cycle mismatch/p2p", SKIPPED, "recv")),
    Scenario(
        "batched-p2p-missing", "one rank omits the send from its batch", "point_to_point", "p2p", Ending.HANGS,
        truth_of("missing cycle mismatch/p2p", SKIPPED, "recv send all_reduce")),
    Scenario("healthy-ddp", "healthy: DistributedDataParallel", "ddp", "ddp", Ending.ENDS),
    Scenario("healthy-fsdp2", "healthy: fully_shard", "fsdp2", "fsdp2", Ending.ENDS, impossible=without_fsdp2),
    Scenario("healthy-mesh", "healthy: collectives on both dimensions of a mesh", "mesh", "2-d", Ending.ENDS, worlds=(4, 8)),
    Scenario("healthy-pipeline", "healthy: a pipeline", "pipeline", "pipeline", Ending.ENDS),
    Scenario(
       
        "healthy-rooted", "healthy: a root runs ahead, and the others follow on a signal in the store", "rooted", "plain", Ending.ENDS),
    Scenario("healthy-subgroups", "healthy: overlapping groups", "overlapping", "subgroups", Ending.ENDS, worlds=(4, 8)),
    Scenario("healthy-p2p", "healthy: send and receive, one by one and batched", "point_to_point", "p2p", Ending.ENDS),
    Scenario(
       
        "healthy-async", "healthy: asynchronous ops in a different but legal order on each rank", "overlapping", "subgroups", Ending.ENDS),
    Scenario("slow-checkpoint", "healthy: rank 0 writes a checkpoint for a long time", "patience", "plain", Ending.ENDS, waits=True),
    Scenario("slow-compilation", "healthy: one rank compiles for a long time", "patience", "plain", Ending.ENDS, waits=True),
    Scenario("expect-slow", "healthy: one rank is in a block marked with expect_slow", "patience", "plain", Ending.ENDS, waits=True),
)
# fmt: on


def find(name: str) -> registry.Scenario:
    """Return the scenario with this name."""
    return registry.find(name, SCENARIOS)
