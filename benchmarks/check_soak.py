"""Compare what `commlens check` says about the soak's random programs with the faults that were put
into them, and with real runs on gloo.

    python benchmarks/check_soak.py [--programs 1000] [--real-minutes 30] [--first 1] [--lines FILE]
    python benchmarks/check_soak.py --seed 7

Programs whose fault comes from outside, such as a signal that the soak sends, are left out: it is
not in the code. A seed always draws the same program.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from _checking import check_source
from _report import Goal, Report, arguments, command, finish
from _soak_job import FINE, NO_FAULT, Outcome, Setting, draw, judge, try_seed
from _soak_program import GLOO, Program
from soak import fault_class

from commlens.model.verdict import Verdict

TIMEOUT_S = 30.0  # of one rank: a program of the soak computes for at most 12 s at once
NO_CALL_SHOWS_IT = (
    *("sleep", "lock", "pipe", "child", "queue", "loop"),
    *("SIGKILL", "SIGSEGV", "SIGSTOP", "SIGTERM"),
    *("start: never-initialises", "start: asleep-after-init"),
)
"""Faults that stop or kill a rank outside of all calls, so that nothing or "not proven" is right."""

OUTCOMES = {
    "right": "the rank is named, and no other; nobody, if two halves disagree; nothing is healthy",
    "undecided": "nobody is named, where the evidence does not tell who is wrong",
    "no effect": "no fault, and a real job may run to its end, too",
    "not proven": "check says that it does not know",
    "not in a call": "no fault is found of a rank that sleeps",
    "other kind": "the rank is named, with another kind of fault",
    "unnamed": "a fault is told, but not the rank",
    "silence": "no fault, in spite of one",
    "wrong rank": "an innocent rank is named",
    "false word": "a fault in a healthy program",
}
GOOD = (*FINE, "not proven", "not in a call")

AGREEMENT = {
    "same": "the same kind of fault and the same ranks, or none",
    "another kind": "the same ranks, another kind of fault",
    "another rank": "a fault, but of another rank, or one of the two names nobody",
    "latent": "check lists as a latent fault what the real job warns of",
    "check is not sure": "not proven",
    "check alone": "only check finds a fault",
    "the job alone": "only the real job has a fault",
}


@dataclass
class Checked:
    """What was said about a program."""

    program: Program
    verdict: Verdict
    word: str  # of OUTCOMES
    why: str
    cpu_s: float
    real: Outcome | None = None

    @property
    def agreement(self) -> str:
        """How this goes together with the verdict on a real run, a word of AGREEMENT."""
        assert self.real is not None
        theirs = next((each for each in self.real.verdicts if each["kind"] not in NO_FAULT), None)
        if self.verdict.kind == "undetermined":
            return "check is not sure"
        if theirs is None:
            return "check alone" if self.verdict.is_fault else "same"
        if not self.verdict.is_fault:
            latent = [each.culprits for each in self.verdict.findings]
            return "latent" if theirs["culprits"] in latent else "the job alone"
        if theirs["culprits"] != self.verdict.culprits:
            return "another rank"
        return "same" if theirs["kind"] == self.verdict.kind else "another kind"

    def __str__(self) -> str:
        truth = self.program.truth
        what = truth.fault if truth.fault == "none" else f"{truth.fault} on rank {truth.culprit}"
        words = [self.word if self.word in GOOD else self.word.upper()]
        if self.real is not None:
            words += [f"real: {self.real.outcome}", self.agreement]
        verdict = self.verdict
        said = f"{verdict.kind} {verdict.culprits}: {verdict.summary}. {verdict.explanation}"
        text = (
            f"{', '.join(words)}; seed {self.program.seed}: {what}; {self.program.size} ranks;"
            f" {','.join(self.program.pieces)}; {self.cpu_s:.1f} CPU s; {self.why}; {said}"
        )
        if self.real is not None:
            theirs = [f"{each['kind']} {each['culprits']}" for each in self.real.verdicts]
            text += f"; real: {', '.join(theirs)} {self.real.why}"
        return text


def programs(first: int) -> Iterator[Program]:
    """Yield the programs of the seeds whose fault is in the code."""
    for seed in itertools.count(first):
        program, _ = draw(seed, GLOO)
        if not program.truth.by_runner:
            yield program


def check(program: Program, folder: Path) -> Checked:
    """Check a program as the command does, and judge the verdict by the truth."""
    began = _cpu_s()
    verdict = check_source(program.source, program.size, folder, timeout_s=TIMEOUT_S)
    word, why = _judge(program, verdict)
    return Checked(program, verdict, word, why, _cpu_s() - began)


def _judge(program: Program, verdict: Verdict) -> tuple[str, str]:
    if verdict.kind == "undetermined":
        return "not proven", ""
    word, why = judge(
        program.truth,
        Outcome(
            program,
            Setting("check", 0, {}),
            verdicts=[msgspec.to_builtins(verdict)],
            exit_status=int(verdict.is_fault),
        ),
        None,
    )
    if word == "silence" and program.truth.fault in NO_CALL_SHOWS_IT:
        return "not in a call", ""
    return word, why


def _cpu_s() -> float:
    return sum(os.times()[:4])


def _table(found: list[Checked], words: list[str], of: str) -> list[list[str]]:
    """Return the rows of a table: one for each class of fault, and one for all of them; one column
    for each word.
    """
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for each in found:
        counts[fault_class(each.program.truth.fault)][getattr(each, of)] += 1
    total = sum(counts.values(), Counter[str]())
    return [
        [name, str(row.total()), *(str(row[word] or "") for word in words)]
        for name, row in [*sorted(counts.items()), ("**all**", total)]
    ]


def _columns(found: list[Checked], words: dict[str, str], of: str) -> list[str]:
    """Return the words that occur, in their order."""
    seen = {getattr(each, of) for each in found}
    return [word for word in words if word in seen]


def _report(found: list[Checked]) -> Report:
    cpu = sum(each.cpu_s for each in found)
    columns = _columns(found, OUTCOMES, "word")
    report = Report(
        "A check of random programs",
        f"{len(found)} random programs of the soak, of 2 to 6 ranks, healthy or with one fault in"
        f" their code, checked by the rules of gloo in {cpu / 60:.0f} CPU minutes. "
        + _meanings(OUTCOMES, columns),
        command(),
    )
    report.table(
        "**What check says, by the fault that was put in**",
        ["fault", "programs", *columns],
        _table(found, columns, "word"),
    )
    real = [each for each in found if each.real is not None]
    if real:
        columns = _columns(real, AGREEMENT, "agreement")
        report.about += (
            f" The first {len(real)} of them ran on gloo under commlens, too. "
            + _meanings(AGREEMENT, columns)
        )
        report.table(
            "**Compared with a real run**",
            ["fault", "programs", *columns],
            _table(real, columns, "agreement"),
        )
    report.rows = [_row(each) for each in found]
    bad = [each for each in found if each.word in ("wrong rank", "false word")]
    missed = [each for each in found if each.word not in GOOD]
    report.goals = [
        Goal(
            "A check of random programs reports no false fault and names no innocent rank",
            f"{len(bad)} of {len(found)}",
            not bad,
        ),
        Goal(
            "A check of random programs finds each fault that a call shows, with its rank and kind",
            f"{len(missed) - len(bad)} of {len(found)} missed, unnamed or of another kind",
            len(missed) == len(bad),
        ),
    ]
    return report


def _meanings(words: dict[str, str], used: list[str]) -> str:
    return "; ".join(f"*{word}*: {words[word]}" for word in used) + "."


def _row(each: Checked) -> dict[str, Any]:
    row: dict[str, Any] = {
        "seed": each.program.seed,
        "fault": each.program.truth.fault,
        "ranks": each.program.size,
        "outcome": each.word,
        "kind": each.verdict.kind,
        "cpu_s": round(each.cpu_s, 2),
    }
    if each.real is not None:
        row |= {"real": each.real.outcome, "agreement": each.agreement}
    return row


def _note(each: Checked, file: Path | None) -> None:
    """Tell about a program that is worth a look, and write a line about each into the file."""
    if file is not None:
        with file.open("a", encoding="utf-8") as lines:
            print(each, file=lines)
    alike = ("same", "latent", "check is not sure")
    apart = each.real is not None and each.agreement not in alike
    if each.word not in GOOD or apart:
        print(each, file=sys.stderr, flush=True)


def main() -> None:
    """Check and run the programs, and print the tables."""
    parser = arguments(__doc__)
    parser.add_argument("--programs", type=int, default=1000, help="the number of programs")
    parser.add_argument("--first", type=int, default=1, help="the first seed")
    parser.add_argument("--seed", type=int, help="check the program of this seed alone")
    parser.add_argument(
        "--real-minutes",
        type=float,
        default=0.0,
        help="run programs on gloo, too, from the first one on, for so long",
    )
    parser.add_argument("--lines", type=Path, help="append a line about each program to this file")
    given: argparse.Namespace = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="commlens-check-soak-") as scratch:
        if given.seed is not None:
            print(check(draw(given.seed, GLOO)[0], Path(scratch) / "check"))
            return
        number, minutes = (12, 0.5) if given.quick else (given.programs, given.real_minutes)
        found: list[Checked] = []
        for program in itertools.islice(programs(given.first), number):
            found.append(check(program, Path(scratch) / "check"))
            _note(found[-1], given.lines)
        end = time.monotonic() + 60 * minutes
        for each in found:
            if time.monotonic() > end:
                break
            each.real = try_seed(each.program.seed, Path(scratch) / "real", GLOO)
            shutil.rmtree(Path(scratch) / "real", ignore_errors=True)
            _note(each, given.lines)
    finish(_report(found), given)


if __name__ == "__main__":
    main()
