"""What to do with a job after a verdict. The golden files hold the action of each whole verdict."""

from __future__ import annotations

import re

import msgspec
import pytest
from msgspec.structs import replace

from commlens.diagnosis.action import Attempt, action_of, attempt_of, with_attempts
from commlens.diagnosis.words.next_steps import action_phrase
from commlens.model.cause import (
    CollectiveRef,
    Dead,
    Doing,
    Ended,
    ExitKind,
    Hardware,
    JobEnding,
    LostNode,
    Missing,
    StuckInside,
    ToldByLogs,
    Why,
)
from commlens.model.health import HealthEvent, What
from commlens.model.verdict import Action, Because, Do, Finding, Verdict
from commlens.model.worlds import JobWorld, Worlds
from conftest import REPOSITORY

HOSTS = {0: "n0", 1: "n0", 2: "n1", 3: "n1"}


def dead(why: Why = "exception", error: str = "", signal: str = "") -> Dead:
    return Dead(
        kind="dead", why=why, root_cause=True, culprits=[2], victims=[0, 1, 3], blamed_by="exit",
        confidence="high", ranks=[2], processes=["own"], waits=[], error=error, signal=signal,
    )  # fmt: skip


def stuck(*hardware: Hardware) -> StuckInside:
    return StuckInside(
        kind="stuck-inside", why="in-collective", root_cause=True, victims=[0, 1, 2, 3],
        blamed_by="nobody", confidence="medium", state="no-progress", ranks=[0, 1, 2, 3], waits=[],
        hardware=[*hardware],
    )  # fmt: skip


def broken(what: What, *, number: int = 0, over: bool = False, explains: bool = True) -> Hardware:
    event = HealthEvent(
        what=what, fault="gpu-fault", part="0000:4f:00.0", at_ns=77, number=number, over=over
    )
    return Hardware(node="n1", ranks=[2], event=event, before_s=1.0, explains=explains, own=True)


def missing(outcome: str = "never-reached", why: Why = "user-code", **more: object) -> Missing:
    doing = Doing(why, works=False, observed=True, unclear=False)
    processes: list[ExitKind] = ["alive"]
    cause = Missing(
        kind="missing", why=why, root_cause=True, culprits=[2], victims=[0, 1, 3],
        blamed_by="absence", confidence="high", ranks=[2], came=[0, 1, 3], processes=processes,
        outcome="never-reached", activity=doing, waits=[], doubt=None,
    )  # fmt: skip
    return replace(cause, outcome=outcome, **more)


def told(ending: JobEnding) -> ToldByLogs:
    return ToldByLogs(
        kind="dead", why="killed", root_cause=True, blamed_by="unknown", confidence="medium",
        report="ended", ranks=[], ending=ending,
    )  # fmt: skip


def verdict_on(
    cause: Dead | Ended | StuckInside | Missing | ToldByLogs, line: str = "train.py:81"
) -> Verdict:
    finding = Finding(
        kind=cause.kind, why=cause.why, root_cause=True, culprits=cause.culprits,
        victims=cause.victims, confidence="high", summary="", source=line, cause=cause,
        collective=CollectiveRef("all_reduce", 7),
    )  # fmt: skip
    return Verdict.from_findings([finding])


@pytest.mark.parametrize(
    ("cause", "do", "because"),
    [
        (dead(error="ValueError: loss is not finite"), "stop", "exception"),
        (dead(error="ConnectionResetError: [Errno 104] Connection reset by peer"), "retry", "connection"),
        (dead(error="OSError: [Errno 116] Stale file handle: '/data/x'"), "retry", "connection"),
        (dead(error="requests.exceptions.ReadTimeout: read timed out"), "retry", "connection"),
        (dead(error="FileNotFoundError: [Errno 2] No such file: 'x'"), "stop", "exception"),
        (dead(error="KeyError: 'Timeout'"), "stop", "exception"),
        (dead(error="torch.OutOfMemoryError: CUDA out of memory. Tried to"), "stop", "memory"),
        (dead(error="RuntimeError: CUDA error: device-side assert triggered"), "stop", "exception"),
        (dead(error="RuntimeError: DataLoader worker (pid 4711) is killed by signal: Killed."), "retry", "killed"),
        (dead(error="KeyboardInterrupt"), "unknown", "not-known"),
        (dead(error="RuntimeError: CUDA error: uncorrectable ECC error encountered"), "exclude-node", "hardware"),
        (dead(error="RuntimeError: CUDA error: unknown error"), "unknown", "not-known"),
        (dead(error="urllib3.exceptions.MaxRetryError: HTTPSConnectionPool"), "retry", "connection"),
        (dead(error="botocore.exceptions.EndpointConnectionError: Could not connect"), "retry", "connection"),
        (dead(error="socket.gaierror: [Errno -3] Temporary failure in name resolution"), "retry", "connection"),
        (dead(error="requests.exceptions.HTTPError: 404 Client Error: Not Found"), "stop", "exception"),
        (dead(error="DistNetworkError: The server socket has failed to listen: EADDRINUSE"), "retry", "connection"),
        (dead(error="RuntimeError: CUDA error: all CUDA-capable devices are busy or unavailable"), "retry", "not-known"),
        (dead(error="RuntimeError: No CUDA GPUs are available"), "exclude-node", "settings"),
        (dead("exit"), "stop", "exception"),
        (replace(dead("exit"), status="137"), "retry", "killed"),
        (replace(dead("exit"), status="139"), "retry", "crashed"),
        (replace(dead("exit"), status="139", victims=[]), "unknown", "not-known"),
        (replace(dead("exit", signal="SIGSEGV"), status="-11"), "retry", "crashed"),
        (replace(dead("exit"), status="255"), "stop", "exception"),  # sys.exit(-1)
        (replace(dead("killed", signal="SIGABRT"), victims=[]), "unknown", "not-known"),
        (dead("killed", signal="SIGKILL"), "retry", "killed"),
        (dead("killed", signal="SIGSEGV"), "retry", "crashed"),
        (dead("out-of-memory", signal="SIGKILL"), "stop", "memory"),
        (dead("unknown"), "unknown", "not-known"),
        (stuck(), "retry", "stuck"),
        (stuck(broken("xid", number=79)), "exclude-node", "hardware"),
        (stuck(broken("xid", number=31)), "retry", "stuck"),
        (stuck(broken("gpu-gone")), "exclude-node", "hardware"),
        (stuck(broken("gpu-gone", explains=False)), "retry", "stuck"),
        (stuck(broken("link-down")), "exclude-node", "hardware"),
        (stuck(broken("link-down", over=True)), "retry", "stuck"),
        (stuck(broken("errors-rose")), "retry", "stuck"),
        (stuck(broken("nfs-silent")), "wait", "storage"),
        (missing(), "unknown", "not-known"),
        (missing(why="data-loading"), "retry", "data"),
        (missing("finished"), "stop", "program"),
        (missing(over=True, processes=["terminated"]), "unknown", "not-known"),
        (missing("key-missing", over=True, processes=["clean"]), "stop", "program"),
        (missing("extra-collective"), "stop", "program"),
        (missing(blamed_by="routine"), "stop", "program"),
        (missing(locked_out=[2]), "stop", "program"),
        (missing("key-missing"), "unknown", "not-known"),
        (missing(lost_nodes=[LostNode("n1", [2, 3], 9.0, vanished=True)]), "exclude-node", "node-lost"),
        (told("preemption"), "retry", "preempted"),
        (told("time-limit"), "retry", "time-limit"),
        (told("node-failure"), "exclude-node", "node-lost"),
        (told("cancelled"), "stop", "cancelled"),
        (told("process-failed"), "unknown", "not-known"),
        (told("evicted"), "retry", "killed"),
        (replace(told("gpu-error"), numbers=[31]), "stop", "exception"),
        (replace(told("gpu-error"), numbers=[31, 79]), "exclude-node", "hardware"),
    ],
)  # fmt: skip
def test_the_table(
    cause: Dead | Ended | StuckInside | Missing | ToldByLogs, do: Do, because: Because
) -> None:
    action = action_of(verdict_on(cause))
    assert action is not None
    assert (action.do, action.because) == (do, because)
    assert bool(action_phrase(action)) == (do != "unknown")


def test_the_node_and_the_part_that_broke() -> None:
    action = action_of(verdict_on(stuck(broken("gpu-gone"))), hosts=HOSTS)
    assert action is not None
    assert (action.nodes, action.parts, action.since_ns) == (["n1"], ["0000:4f:00.0"], 77)
    assert action_phrase(action) == "start it again without n1: a part of the node broke"


def earlier(
    cause: Dead | Ended | StuckInside | Missing | ToldByLogs,
    line: str = "train.py:81",
    *,
    culprit: int = 2,
    hosts: dict[int, str] = HOSTS,
    is_short: bool = True,
) -> Attempt:
    if cause.culprits:
        cause = replace(cause, culprits=[culprit])
    verdict = verdict_on(cause, line)
    verdict.action = action_of(verdict, hosts=hosts)
    attempt = msgspec.json.decode(verdict.to_json(), type=Attempt)  # as it is read from a file
    attempt.is_short = is_short
    assert attempt == attempt_of(verdict, is_short=is_short)
    return attempt


def decided(verdict: Verdict, before: list[Attempt]) -> Action:
    verdict.action = action_of(verdict, hosts=HOSTS)
    action = with_attempts(verdict, before)
    assert action is not None
    return action


KILLED = dead("killed", signal="SIGKILL")
CRASHED = dead("killed", signal="SIGSEGV")
MOVED = {0: "n0", 1: "n1", 2: "n2", 3: "n1"}
STALE = Ended(
    kind="dead", why="exception", root_cause=True, culprits=[2], victims=[0, 1, 3],
    blamed_by="exit", confidence="high", ranks=[2], processes=["own"], how="kept-address",
    restarts=1,
)  # fmt: skip
LOST = missing(lost_nodes=[LostNode("n1", [2], 9.0, vanished=True)])


@pytest.mark.parametrize(
    ("cause", "before", "do", "attempts"),
    [
        (KILLED, [], "retry", 1),
        (KILLED, [earlier(KILLED)], "stop", 2),
        (KILLED, [earlier(KILLED, culprit=3)], "exclude-node", 2),
        (KILLED, [earlier(KILLED, culprit=3, hosts={3: "n2"})], "stop", 2),
        (KILLED, [earlier(KILLED, hosts=MOVED)], "stop", 2),
        (KILLED, [earlier(KILLED, is_short=False)], "stop", 2),  # at the same collective
        (KILLED, [earlier(KILLED, "train.py:9")], "retry", 1),
        (KILLED, [earlier(KILLED, "train.py:9"), earlier(KILLED, "train.py:7")], "stop", 3),
        (KILLED, [earlier(CRASHED)], "retry", 1),
        (KILLED, [earlier(missing()), earlier(KILLED)], "retry", 1),
        (stuck(), [earlier(stuck()), earlier(stuck())], "stop", 3),
        # torch's restart meets an address of the former start
        (KILLED, [earlier(STALE), earlier(KILLED)], "stop", 2),
        (STALE, [earlier(STALE)], "stop", 2),
        (missing(), [earlier(missing())], "stop", 2),
        (missing(), [earlier(LOST)], "unknown", 1),
        (told("preemption"), [earlier(told("preemption"))] * 3, "retry", 4),
        (missing("finished"), [earlier(missing("finished"))], "stop", 2),
        (dead("out-of-memory"), [earlier(dead("out-of-memory"))], "stop", 2),
    ],
)
def test_a_fault_that_comes_back(
    cause: Dead | Ended | StuckInside | Missing | ToldByLogs,
    before: list[Attempt],
    do: Do,
    attempts: int,
) -> None:
    action = decided(verdict_on(cause), before)
    assert (action.do, action.attempts) == (do, attempts)
    if do == "exclude-node":
        assert action.nodes == ["n1"]


def test_numbers_of_processes_in_several_worlds_are_not_compared() -> None:
    verdict = verdict_on(KILLED)
    verdict.worlds = Worlds((JobWorld("trainer", 0, 2), JobWorld("rollout", 2, 2)))
    assert decided(verdict, [earlier(KILLED, culprit=3)]).do == "stop"


def test_a_fault_at_another_collective_of_a_long_run_is_another_one() -> None:
    now = verdict_on(KILLED)
    now.collective = CollectiveRef("all_reduce", 8)
    action = decided(now, [earlier(KILLED, is_short=False)])
    assert (action.do, action.attempts) == ("retry", 1)


@pytest.mark.parametrize(("hosts", "do"), [(HOSTS, "exclude-node"), ({2: "n1", 3: "n1"}, "stop")])
def test_a_setting_that_all_nodes_have_is_no_broken_node(hosts: dict[int, str], do: Do) -> None:
    cause = dead(error="RuntimeError: CUDA driver version is insufficient for CUDA runtime")
    action = action_of(verdict_on(cause), hosts=hosts)
    assert action is not None
    assert action.do == do


def test_an_attempt_that_finds_no_memory_is_not_retried_without_end() -> None:
    others = "CUDA out of memory. Process 1 has 74.12 GiB memory in use. this process has 3.40 GiB"
    verdict = verdict_on(dead(error=f"torch.OutOfMemoryError: {others}"), "")
    verdict.source = verdict.collective = None
    verdict.action = action_of(verdict)
    assert verdict.action is not None and verdict.action.do == "retry"
    before = attempt_of(verdict, is_short=True)
    actions = [with_attempts(verdict, [before] * times) for times in (1, 2)]
    assert [action.do for action in actions if action is not None] == ["retry", "stop"]


def test_an_action_is_not_surer_than_its_verdict() -> None:
    verdict = verdict_on(missing("finished"))
    verdict.findings[0].confidence = "low"
    action = action_of(verdict)
    assert action is not None
    assert action.confidence == "low"


def test_no_action_without_a_fault() -> None:
    assert action_of(Verdict(summary="nothing is wrong")) is None


def test_the_node_that_the_scheduler_names() -> None:
    action = action_of(verdict_on(replace(told("node-failure"), nodes=["gpu-12"])))
    assert action is not None
    assert (action.do, action.nodes) == ("exclude-node", ["gpu-12"])


RESTARTS = REPOSITORY / "docs" / "restarts.md"
ROW = re.compile(
    r"^\| (?P<cause>[^|]+) \| (?P<truth>[^|]+) \| \[`(?P<do>[\w-]+)`\]\(\.\./(?P<golden>[^)]+)\)"
    r" \| `(?P<because>[\w-]+)` \|$",
    re.MULTILINE,
)
RIGHT: dict[str, tuple[Do, ...]] = {
    "it passes": ("retry", "wait"),
    "a node is at fault": ("exclude-node",),
    "the program or its settings are at fault": ("stop",),
    "either may be: `stop` or `exclude-node` if it comes back": ("retry",),
    "not known": ("unknown",),
}


def test_the_docs_name_the_right_action_for_each_of_many_causes() -> None:
    page = RESTARTS.read_text().split("## Causes and actions")[1]
    rows = [*ROW.finditer(page)]
    assert len(rows) == page.count("\n| ") - 1 >= 40  # without the heading
    assert f"of {len(rows)} causes" in page
    for row in rows:
        text = (REPOSITORY / row["golden"]).read_text()
        told = next(line for line in text.splitlines() if line.startswith("action: "))
        action = msgspec.json.decode(told.removeprefix("action: "), type=Action)
        assert (action.do, action.because) == (row["do"], row["because"]), row["cause"]
        assert action.do in RIGHT[row["truth"]], row["cause"]
        again = verdict_on(KILLED)
        again.action = action
        come_back = with_attempts(again, [attempt_of(again, is_short=True)])
        assert come_back is not None
        if "comes back" in row["truth"]:
            assert come_back.do == "stop", row["cause"]
