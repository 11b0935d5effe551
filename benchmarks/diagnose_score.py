"""Compare how often commlens and torchfrtrace find the culprit in the same dumps.

    python benchmarks/diagnose_score.py --sizes 16 64 --json score.json --markdown score.md

An answer is *right* if it blames exactly the true culprits and (commlens only) gives a true kind to
every root cause; for a healthy job, if it finds no fault; for a collective that all ranks joined
and that does not complete, if it reports that and blames no rank. *Vague*: the true culprits among
other ranks, only some of them, a wrong kind, or a fault without a culprit. *Wrong*: other ranks are
blamed, or a fault is found in a healthy job. *Silent*: the fault is not found. *Crashed*: an
exception or no answer. torchfrtrace's culprits are read from its output: every "Culprit rank N" and
all "missing ranks". It gets the option that it needs if dumps are missing, and the prefix of the
names.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _diagnosing as judge
from _report import Goal
from dumpgen import MESHES, Conditions, Job, Truth
from dumpgen.faults import possible
from dumpgen.mesh import FLAT_MESHES, MEGATRON_MESHES, Mesh

PREFIX = "rank_"


@dataclass
class Case:
    """A set of dumps with its truth."""

    family: str
    name: str
    truth: Truth
    write: Callable[[Path], None]
    complete: bool = True
    prefix: str = PREFIX
    how: str = ""  # to have these files again


CONDITIONS = {
    "plain": Conditions(),
    "timing": Conditions(version="2.9", timing=True, batched_p2p=True, skew_s=2.0),
    "old": Conditions(version="2.3", stacks=False, history=3, skew_s=0.3),
    "in-flight": Conditions(version="2.9", stacks=False, in_flight_only=True),
}
"""Besides the fault: torch's default; clocks two seconds apart; a ring buffer that has not wrapped;
only records in flight.
"""

LAYOUTS = {"FSDP x TP x PP": MESHES, "FSDP x TP": FLAT_MESHES, "Megatron": MEGATRON_MESHES}
_OPTION = {"FSDP x TP": " --flat", "Megatron": " --megatron"}

UNKNOWABLE = {"in-flight": {"straggler", "lost-recv"}}
"""Faults that leave no trace in such dumps."""


def generated(sizes: list[int], only: str) -> Iterator[Case]:
    """Yield every fault on every mesh; up to 64 ranks, under all conditions."""
    for layout, meshes in LAYOUTS.items():
        for size in sizes:
            if size not in meshes:
                continue
            for label, conditions in CONDITIONS.items():
                if label != "plain" and (size > 64 or layout == "FSDP x TP"):
                    continue
                for fault in possible(meshes[size]):
                    if only in fault.name and fault.name not in UNKNOWABLE.get(label, ()):
                        yield _case(layout, meshes[size], fault, label, conditions)


def _case(layout: str, mesh: Mesh, fault: Any, label: str, conditions: Conditions) -> Case:
    job = Job(mesh, fault, conditions)
    options = {
        "timing": " --timing --batched-p2p --version 2.9 --skew 2",
        "old": " --version 2.3 --no-stacks --history 3 --skew 0.3",
        "in-flight": " --version 2.9 --no-stacks --in-flight-only",
    }.get(label, "")
    return Case(
        family=f"{layout}, {mesh.size} ranks, {label}",
        name=fault.name,
        truth=job.truth,
        write=lambda folder: job.write(folder, prefix=PREFIX),
        complete=len(job.ranks()) == mesh.size,
        how=(
            f"python -m dumpgen FOLDER --ranks {mesh.size}{_OPTION.get(layout, '')} --fault"
            f" {fault.name}{options}"
        ),
    )


REAL = {"gpu_error_1st": (12, 14), "lock_gil_1st": (9, 14)}


def real(folder: Path) -> Iterator[Case]:
    """Yield real dumps of a Megatron job on 16 GPUs, if COMMLENS_TEST_DATA names their folder."""
    for name, culprits in REAL.items():
        source = folder / "megatron_moe_16ranks" / name
        if source.is_dir():
            yield Case(
                family="real, 16 ranks",
                name=name,
                truth=Truth(
                    ("missing", "dead", "cycle", "mismatch/p2p", "mismatch/op", "stuck-inside"),
                    culprits,
                ),
                write=lambda to, source=source: shutil.copytree(
                    source, to, ignore=shutil.ignore_patterns("*.log"), dirs_exist_ok=True
                ),
                prefix="_dump_",
                how=str(source),
            )


def scenarios(folder: Path, only: str) -> Iterator[Case]:
    """Yield the dumps of the project's faulty scenarios, run here over gloo."""
    import _scenarios

    for family, name, truth, files, complete in _scenarios.run_all(folder, only):
        yield Case(
            family,
            name,
            truth,
            lambda to, files=files: shutil.copytree(files, to, dirs_exist_ok=True),
            complete,
            how=f"commlens demo {name}",
        )


def judged(case: Case, folder: Path, *, rival: bool) -> dict[str, Any]:
    """Return both tools' answers to one case."""
    case.write(folder)
    ours = judge.commlens(folder)
    row: dict[str, Any] = {
        "family": case.family,
        "case": case.name,
        "true_kinds": list(case.truth.kinds),
        "true_culprits": list(case.truth.culprits),
        "how": case.how,
        "commlens": judge.grade(ours, case.truth),
        "commlens_says": {
            "kinds": list(ours.kinds),
            "culprits": list(ours.culprits[:32]),
            "text": ours.crashed or ours.text,
        },
        "commlens_s": round(ours.seconds, 2),
    }
    if rival:
        theirs = judge.torchfrtrace(folder, case.prefix, complete=case.complete)
        row["torchfrtrace"] = judge.grade(theirs, case.truth, kinds=False)
        row["torchfrtrace_says"] = {
            "culprits": list(theirs.culprits[:32]),
            "text": theirs.crashed or theirs.text[-200:],
        }
        row["torchfrtrace_s"] = round(theirs.seconds, 2)
    return row


def summary(rows: list[dict[str, Any]]) -> str:
    """Return a Markdown table with the number of answers of each grade, per family."""
    lines = [
        "| dumps | cases | tool | " + " | ".join(judge.GRADES) + " |",
        "|---|---|---|" + "---|" * len(judge.GRADES),
    ]
    families = list(dict.fromkeys(row["family"] for row in rows))
    for family in [*families, "all"]:
        chosen = [row for row in rows if family in ("all", row["family"])]
        for tool in ("commlens", "torchfrtrace"):
            counts = Counter(row[tool] for row in chosen if tool in row)
            if counts:
                cells = " | ".join(str(counts[one] or "") for one in judge.GRADES)
                lines.append(f"| {family} | {sum(counts.values())} | {tool} | {cells} |")
    wrong = [row for row in rows if row["commlens"] != "right"]
    if wrong:
        lines += ["", "Not right:", ""]
        for row in wrong:
            says = row["commlens_says"]
            lines.append(
                f"- {row['family']}, {row['case']}: {row['commlens']}. Truth:"
                f" {'/'.join(row['true_kinds'])} {row['true_culprits']}; said:"
                f" {', '.join(says['kinds'])} {says['culprits']} ({says['text'][:200]})."
                f" `{row['how']}`"
            )
    return "\n".join(lines) + "\n"


def goals(rows: list[dict[str, Any]]) -> list[Goal]:
    """Return the goal of the design, with what was measured."""
    grades = {
        tool: Counter(row[tool] for row in rows if tool in row)
        for tool in ("commlens", "torchfrtrace")
    }
    ours, theirs = grades["commlens"], grades["torchfrtrace"]
    measured = f"{ours['right']} of {sum(ours.values())} right, {ours['wrong']} wrong"
    if theirs:
        measured += f"; torchfrtrace {theirs['right']} right, {theirs['wrong']} wrong"
    return [
        Goal(
            "Every verdict on an injected fault names exactly the culprits",
            measured,
            ours["right"] == sum(ours.values()),
        )
    ]


def _one(case: Case, rival_up_to: int) -> dict[str, Any]:
    size = int(case.family.split(", ")[1].split()[0])
    with tempfile.TemporaryDirectory(prefix="commlens-score-") as folder:
        row = judged(case, Path(folder), rival=size <= rival_up_to)
    print(
        f"{row['family']:42} {row['case']:20} {row['commlens']:8} {row.get('torchfrtrace', ''):8}"
        f" {row['commlens_s']} s",
        file=sys.stderr,
        flush=True,
    )
    return row


def main() -> int:
    """Measure, print the table, and write it if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--sizes", type=int, nargs="*", default=[16, 64], help="world sizes of the generated dumps"
    )
    parser.add_argument("--only", default="", help="run only faults whose name contains this")
    parser.add_argument("--conditions", nargs="*", choices=list(CONDITIONS), help="run only these")
    parser.add_argument(
        "--rival-up-to",
        type=int,
        default=64,
        help="run torchfrtrace only up to this world size, because its time grows with the square",
    )
    parser.add_argument(
        "--scenarios",
        action="store_true",
        help="also run the project's own scenarios over gloo (takes minutes)",
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    cases = list(generated(arguments.sizes, arguments.only))
    if arguments.conditions:
        cases = [case for case in cases if case.family.split(", ")[-1] in arguments.conditions]
    data = os.environ.get("COMMLENS_TEST_DATA")
    if data and not arguments.conditions:
        cases += [case for case in real(Path(data)) if arguments.only in case.name]
    with (
        tempfile.TemporaryDirectory(prefix="commlens-score-") as folder,
        ThreadPoolExecutor(os.cpu_count() or 1) as pool,
    ):
        more = scenarios(Path(folder), arguments.only) if arguments.scenarios else iter(())
        rows = list(pool.map(lambda case: _one(case, arguments.rival_up_to), (*cases, *more)))
    judge.tell(summary(rows), rows, arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
