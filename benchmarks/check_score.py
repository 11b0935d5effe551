"""Count how often `commlens check` is right: about the scenarios, and about small programs with a
fault of a known class.

    python benchmarks/check_score.py [--real] [--only NAME ...] [--rows FILE] [--write]

``--real`` runs the small programs with `commlens launch`, too. ``--rows`` notes each program when
it is done, and takes those that are in the file already from there: a run that was interrupted goes
on. ``--write`` writes the tables into docs/check.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from _bug_classes import CASES, Case
from _checking import check_source
from _report import Goal, Report, arguments, command, finish, write_section
from _soak_job import NO_FAULT, Job, Setting
from _soak_program import Program, Truth

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "integration"))

from more_scenarios import SCENARIOS

from commlens.check.api import check_plan
from commlens.check.run_rank import Plan
from commlens.model.verdict import Verdict
from commlens.scenarios import lab
from commlens.scenarios.registry import Scenario

TIMEOUT_S = 40.0  # of one rank
WORLD_SIZE = 4  # of the scenarios
PAGE = Path(__file__).resolve().parents[1] / "docs" / "check.md"
STALL_TIMEOUT = "4"

AREAS = {
    "scenarios: calls that differ or are left out": (
        *("skip-then-other", "skip-then-same", "uneven-then-barrier", "ddp-skip-backward"),
        *("mismatch-op", "mismatch-size", "mismatch-dtype", "mismatch-reduce-op", "mismatch-root"),
        "fsdp2-forward-order",
    ),
    "scenarios: deadlocks across groups and between messages": (
        *("swap-two-groups", "swap-three-groups", "recv-without-send", "both-recv"),
        *("batched-p2p-missing", "pipeline-lost-send"),
    ),
    "scenarios: groups, meshes, keys of the store": (
        *("new-group-order", "mesh-shape", "unanswered-key"),
    ),
    "scenarios: exceptions and exits": ("dies-exception", "dies-exit", "dies-hard-exit"),
}
OUTSIDE = "scenarios: faults outside of the program's calls"
CORRECT = "correct"


@dataclass(frozen=True)
class Judged:
    """A program, and what was said about it."""

    name: str
    area: str
    word: str  # "right", "not proven", "nothing", "wrong"
    said: str  # the first line of the verdict
    real: bool | None = None  # whether the verdict in a real job is right; None: it did not run


def scenarios() -> list[Scenario]:
    """Return the scenarios that can run here."""
    return [each for each in SCENARIOS if WORLD_SIZE in each.worlds and not each.impossible()]


def check_scenario(scenario: Scenario) -> Judged:
    """Check a scenario."""

    def program() -> None:
        lab.running_name = scenario.name
        importlib.import_module(f"{scenario.package}.programs.{scenario.program}").main()

    truth = scenario.truth(WORLD_SIZE)
    area = next((area for area, names in AREAS.items() if scenario.name in names), OUTSIDE)
    if scenario.fault is None:
        area = f"scenarios: {CORRECT}"
    checked, _ = check_plan(Plan(program, WORLD_SIZE, timeout_s=TIMEOUT_S), backend="gloo")
    verdict = checked.verdict
    kinds = () if scenario.fault is None else truth.kinds
    return Judged(scenario.name, area, _word(verdict, kinds, truth.culprits), verdict.summary)


def check_case(case: Case, folder: Path, *, real: bool) -> Judged:
    """Check a small program, and run it."""
    verdict = check_source(case.source, case.size, folder, timeout_s=TIMEOUT_S, backend="gloo")
    return Judged(
        case.name,
        case.area or CORRECT,
        _word(verdict, case.kinds.split(), case.culprits),
        verdict.summary,
        run_case(case, folder / "real") if real else None,
    )


def run_case(case: Case, folder: Path) -> bool:
    """Run a small program with `commlens launch`, and return whether what it says is right."""
    setting = Setting("launch", float(STALL_TIMEOUT), {"COMMLENS_STALL_TIMEOUT": STALL_TIMEOUT})
    truth = Truth(case.name if case.kinds else "none")
    outcome = Job(Program(0, case.size, case.source, truth, ()), setting, folder).run()
    faults = [each for each in outcome.verdicts if each["kind"] not in NO_FAULT]
    if not case.kinds:
        return not faults
    if "hazard" in case.kinds.split() and not faults:
        return any(
            line.startswith("commlens: ") and "train.py:" in line
            for line in outcome.text.splitlines()
        )
    return bool(faults) and all(
        _is_right(each["kind"], each["culprits"], case.kinds.split(), case.culprits)
        for each in faults
    )


def _word(verdict: Verdict, kinds: Sequence[str], culprits: Sequence[int] | None) -> str:
    if verdict.kind == "undetermined":
        return "not proven"
    if "hazard" in kinds:
        found = [each.cause.culprits for each in verdict.findings if each.kind == "hazard"]
        if found and not verdict.is_fault:
            return "right" if any(_names(each, culprits) for each in found) else "wrong"
    if not verdict.is_fault:
        return "nothing" if kinds else "right"
    return "right" if _is_right(verdict.kind, verdict.culprits, kinds, culprits) else "wrong"


def _is_right(
    kind: str, named: Iterable[int], kinds: Sequence[str], culprits: Sequence[int] | None
) -> bool:
    return kind in kinds and _names(named, culprits)


def _names(named: Iterable[int], culprits: Sequence[int] | None) -> bool:
    """Check whether no wrong rank is named."""
    return culprits is None or set(named) <= set(culprits)


# --- the report


def _number(found: Iterable[Judged], word: str = "") -> str:
    return str(sum(not word or each.word == word for each in found))


def _faults(found: list[Judged]) -> list[list[str]]:
    """Return the rows of the table of programs with a fault in their code."""
    chosen = [each for each in found if each.area != OUTSIDE and CORRECT not in each.area]
    areas = [*AREAS, *dict.fromkeys(case.area for case in CASES if case.area)]
    rows = []
    for area in [*areas, ""]:
        own = [each for each in chosen if not area or each.area == area]
        if own:
            ran = [each for each in own if each.real is not None]
            real = f"{sum(bool(each.real) for each in ran)} of {len(ran)}" if ran else ""
            numbers = [_number(own), _number(own, "right"), _number(own, "not proven"), real]
            rows.append([area or "**all**", *numbers])
    return rows


def _correct(found: list[Judged]) -> list[list[str]]:
    kinds = {"scenarios": f"scenarios: {CORRECT}", "the classes above": CORRECT}
    rows = []
    for name, area in kinds.items():
        own = [each for each in found if each.area == area]
        if own:
            words = ("right", "not proven", "wrong")
            rows.append([name, _number(own), *(_number(own, word) for word in words)])
    return rows


def _exceptions(found: list[Judged]) -> list[str]:
    """Return a line about each program of which something else was said than the truth."""
    return [
        f"* `{each.name}` ({each.area}): {each.said}." for each in found if each.word != "right"
    ]


def _report(found: list[Judged]) -> Report:
    ran = any(each.real is not None for each in found)
    real = (
        " *In a real job* counts the right verdicts of `commlens launch` on the same programs."
        if ran
        else ""
    )
    report = Report(
        "How often a check is right",
        f"[The scenarios](scenarios.md) with {WORLD_SIZE} ranks, and small programs of the classes"
        " of the MPI Bugs Initiative, ported to torch.distributed with 2 to 4 ranks, by the rules of"
        f" gloo, on torch {torch.__version__.partition('+')[0]} without a GPU. A fault counts as"
        f" found if its kind is right and no wrong rank is named.{real}",
        command(),
    )
    columns = ["programs with a fault in the code", "number", "found", "not proven"]
    rows = _faults(found)
    if ran:
        columns.append("in a real job")
    report.table("", columns, [row[: len(columns)] for row in rows])
    report.table(
        "",
        ["correct programs", "number", "no fault", "not proven", "a fault"],
        _correct(found),
    )
    outside = [each for each in found if each.area == OUTSIDE]
    if outside:
        report.markdown += (
            f"\n{len(outside)} other scenarios have faults outside of the program's calls, such as"
            f" a data loader that stalls: {_number(outside, 'not proven')} are not proven, no fault is"
            f" found in {_number(outside, 'nothing')}, and {_number(outside, 'wrong')} get a wrong"
            " verdict.\n"
        )
    exceptions = _exceptions([each for each in found if each.area != OUTSIDE])
    if exceptions:
        report.markdown += (
            "\nPrograms whose verdict is not the truth:\n\n" + "\n".join(exceptions) + "\n"
        )
    report.rows = [dataclasses.asdict(each) for each in found]
    wrong = [each for each in found if each.word == "wrong"]
    report.goals = [
        Goal(
            "A check finds no fault in a correct program and names no innocent rank",
            f"{len(wrong)} of {len(found)}",
            not wrong,
        )
    ]
    return report


def _known(file: Path | None) -> dict[str, Judged]:
    """Return what an earlier run noted, by name."""
    if file is None or not file.exists():
        return {}
    rows = [Judged(**json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]
    return {each.name: each for each in rows}


def main() -> None:
    """Check the programs, and print the tables."""
    parser = arguments(__doc__)
    parser.add_argument("--real", action="store_true", help="run the small programs, too")
    parser.add_argument("--only", nargs="+", default=[], help="beginnings of the programs' names")
    parser.add_argument("--rows", type=Path, help="note each program in this file")
    parser.add_argument("--write", action="store_true", help="write the tables into docs/check.md")
    given: argparse.Namespace = parser.parse_args()
    only = tuple(given.only) or (("order", "healthy-plain") if given.quick else ("",))
    known = _known(given.rows)
    found: list[Judged] = []

    def judge(name: str, checked: Callable[[], Judged]) -> None:
        if not name.startswith(only):
            return
        found.append(known.get(name) or checked())
        if given.rows and name not in known:
            with given.rows.open("a", encoding="utf-8") as rows:
                print(json.dumps(dataclasses.asdict(found[-1])), file=rows)

    for scenario in scenarios():
        judge(scenario.name, functools.partial(check_scenario, scenario))
    with tempfile.TemporaryDirectory(prefix="commlens-check-score-") as scratch:
        for case in CASES:
            folder = Path(scratch) / case.name
            judge(case.name, functools.partial(check_case, case, folder, real=given.real))
    report = _report(found)
    finish(report, given)
    if given.write:
        text = f"`{report.command}`: {report.about}\n{report.markdown}".strip()
        write_section(PAGE, "measured", text)


if __name__ == "__main__":
    main()
