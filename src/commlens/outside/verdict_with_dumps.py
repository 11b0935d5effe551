"""Join the verdict on stacks with torch's own dumps and log lines: dumps hold sequence numbers, so
they decide where stacks cannot.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from commlens.diagnosis.api import examine_paths
from commlens.errors import CommlensError
from commlens.model.health import NodeHealth
from commlens.model.verdict import Verdict
from commlens.outside.sample import HostSamples
from commlens.outside.verdict import judge


def judge_with_dumps(hosts: Sequence[HostSamples]) -> Verdict:
    """Return the verdict on all evidence about one job."""
    verdict = judge(hosts)
    lines = [line for host in hosts for line in host.log_lines]
    if verdict.findings:
        verdict.findings[0].evidence += lines
    elif lines:
        verdict.missing_evidence += [
            f"A log has a line about an error, perhaps an old one: {line}" for line in lines
        ]
    dumps = {name: content for host in hosts for name, content in host.dumps.items()}
    healths = [host.health for host in hosts if host.health is not None]
    recorded = _of_dumps(dumps, healths, verdict.missing_evidence) if dumps else None
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


def _of_dumps(
    dumps: dict[str, bytes], healths: Sequence[NodeHealth], missing: list[str]
) -> Verdict | None:
    with tempfile.TemporaryDirectory(prefix="commlens-attach-") as folder:
        for name, content in dumps.items():
            Path(folder, name).write_bytes(content)
        try:
            return examine_paths(folder, health=healths).verdict
        except CommlensError as error:
            missing.append(f"Torch's own dumps could not be read: {error}")
            return None
