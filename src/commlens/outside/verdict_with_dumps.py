"""Join the verdict on stacks with torch's own dumps and log lines: dumps hold sequence numbers, so
they decide where stacks cannot, and stacks show what the ranks do that the dumps name.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from commlens.diagnosis.api import examine_paths
from commlens.errors import CommlensError
from commlens.model.cause import Missing
from commlens.model.health import NodeHealth
from commlens.model.ranklog import Observation
from commlens.model.verdict import Verdict
from commlens.outside.sample import HostSamples
from commlens.outside.verdict import judge


def judge_with_dumps(hosts: Sequence[HostSamples]) -> Verdict:
    """Return the verdict on all evidence about one job."""
    verdict = judge(hosts)
    dumps = {name: content for host in hosts for name, content in host.dumps.items()}
    healths = [host.health for host in hosts if host.health is not None]
    recorded = _of_dumps(dumps, healths, verdict) if dumps else None
    if recorded is not None:
        seen = {one.rank: one.log.observation for host in hosts for one in host.samples}
        recorded = _with_stacks(recorded, verdict, seen, dumps, healths)
    if recorded is None or not recorded.is_fault or not verdict.is_fault:
        return verdict  # a job that moves has ops in flight at any moment, which is no fault
    for finding in verdict.findings:
        finding.root_cause = False
        if finding.cause is not None:
            finding.cause.root_cause = False
        finding.summary = f"seen from outside: {finding.summary}"
    recorded.looked_at = f"torch's own dumps ({recorded.looked_at}), and {verdict.looked_at}"
    recorded.missing_evidence = list(
        dict.fromkeys([*recorded.missing_evidence, *verdict.missing_evidence])
    )
    recorded.findings += verdict.findings
    return recorded


def _with_stacks(
    recorded: Verdict,
    verdict: Verdict,
    seen: Mapping[int, Observation],
    dumps: Mapping[str, bytes],
    healths: Sequence[NodeHealth],
) -> Verdict:
    """Return the verdict on the dumps with what the stacks show of the ranks that do not arrive, if
    the stacks show them outside of collectives, too.
    """
    outside = {
        rank
        for finding in verdict.findings
        if isinstance(finding.cause, Missing)
        for rank in finding.culprits
    }
    if not isinstance(recorded.cause, Missing) or not set(recorded.cause.ranks) <= outside:
        return recorded
    observed = {rank: seen[rank] for rank in recorded.cause.ranks if rank in seen}
    joined = _of_dumps(dumps, healths, verdict, observed)
    if joined is None or (joined.kind, joined.culprits) != (recorded.kind, recorded.culprits):
        return recorded
    return joined


def _of_dumps(
    dumps: Mapping[str, bytes],
    healths: Sequence[NodeHealth],
    verdict: Verdict,
    observed: Mapping[int, Observation] | None = None,
) -> Verdict | None:
    """Return the verdict on the dumps; None if no dump can be read, as ``verdict`` then says."""
    with tempfile.TemporaryDirectory(prefix="commlens-attach-") as folder:
        for name, content in dumps.items():
            Path(folder, name).write_bytes(content)
        try:
            return examine_paths(folder, health=healths, observed=observed).verdict
        except CommlensError as error:
            verdict.missing_evidence.append(f"Torch's own dumps could not be read: {error}")
            return None
