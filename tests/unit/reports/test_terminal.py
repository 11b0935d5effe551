"""The verdict on a terminal and as JSON."""

from __future__ import annotations

import io

import jsonschema
import msgspec
import pytest
from verdict_schema import schema

from commlens.model.verdict import CollectiveRef, Finding, GroupRef, Verdict
from commlens.model.wrapping import fill
from commlens.reports.json_report import print_json
from commlens.reports.terminal import print_verdict, render
from commlens.watch.reporting import say_to_stderr


def finding(**more: object) -> Finding:
    about: dict[str, object] = dict(  # noqa: C408
        kind="missing",
        why="data-loading",
        root_cause=True,
        culprits=[2],
        victims=[0, 1, 3],
        confidence="high",
        summary="rank 2 never reached all_reduce #41 of group dp [0-3]; ranks 0-1,3 wait for it",
        explanation=(
            "rank 2 (host n03, pid 4121) has been in train.py:57 load_batch for 31 s; its last"
            " collective, all_reduce #40 of group dp [0-3], completed. Ranks 0-1,3 have been"
            " waiting for 31 s at train.py:81 step, float32[1048576] SUM."
        ),
        next_step="look at load_batch (train.py:57) on rank 2",
        group=GroupRef("1", "dp", [0, 1, 2, 3]),
        collective=CollectiveRef("all_reduce", 41),
        source="train.py:57",
        source_file="/home/me/train.py:57",
        function="load_batch",
        evidence=["rank 2: its stack does not move and it uses no CPU."],
    )
    return Finding(**(about | more))  # type: ignore[arg-type]


def verdict(*findings: Finding, **more: object) -> Verdict:
    return Verdict.from_findings(
        list(findings), **({"looked_at": "4 ranks, 160 records of 1 group"} | more)
    )


GOLDEN = """\
VERDICT  rank 2 never reached all_reduce #41 of group dp [0-3]; ranks 0-1,3 wait
         for it.
WHY      rank 2 (host n03, pid 4121) has been in train.py:57 load_batch for
         31 s; its last collective, all_reduce #40 of group dp [0-3], completed.
         Ranks 0-1,3 have been waiting for 31 s at train.py:81 step,
         float32[1048576] SUM.
NEXT     look at load_batch (train.py:57) on rank 2.

Evidence
  - rank 2: its stack does not move and it uses no CPU.

Looked at 4 ranks, 160 records of 1 group.
"""


def test_the_answer_comes_first_and_fits_into_80_columns() -> None:
    assert render(verdict(finding())) == GOLDEN


def test_print_shows_the_words() -> None:
    assert f"{verdict(finding())}\n" == GOLDEN
    others = str(
        verdict(
            finding(),
            finding(summary="rank 7 waits too"),
            missing_evidence=["Rank 5 left no record"],
        )
    )
    assert (
        "\n\nAlso found\n  - rank 7 waits too (train.py:57).\n\nNot known\n  - Rank 5 left no"
        " record.\n" in others
    )


def test_a_notice_wraps_like_a_verdict(capsys) -> None:
    say_to_stderr(
        "ranks 0-1,3 have been waiting in all_reduce #40 of group dp [0-3] for as long as 31 s;"
        " rank 2 is in train.py:57"
    )
    first, second = capsys.readouterr().err.splitlines()
    assert (
        first == "commlens: ranks 0-1,3 have been waiting in all_reduce #40 of group dp [0-3] for"
    )
    assert second == "          as long as 31 s; rank 2 is in train.py:57"


@pytest.mark.parametrize("width", range(30, 60))
def test_numbers_stay_with_their_units_and_paths_whole(width: int) -> None:
    path = "/data/a-long/path/train.py:57"
    words = fill(
        f"rank 2 has been waiting for 31 s in all_reduce #40 of 16.8 MB at {path}",
        width,
        indent="  ",
    )
    rich = render(verdict(finding(summary="it has waited for as long as 31 s for 16.8 MB")), width)
    assert path in words.split()
    for lines in (words, rich):
        assert (
            "31 s" in lines
            and "16.8 MB" in lines
            and max(map(len, lines.splitlines())) <= max(width, 31)
        )


def test_no_escape_codes_without_colour_and_some_with() -> None:
    plain, coloured = io.StringIO(), io.StringIO()
    print_verdict(verdict(finding()), plain, 80)
    print_verdict(verdict(finding()), coloured, 80, colour=True)
    assert "\x1b" not in plain.getvalue()
    assert "\x1b[" in coloured.getvalue()


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_nothing_is_lost_at_any_width(width: int) -> None:
    text = render(verdict(finding()), width)
    assert max(map(len, text.splitlines())) <= width
    assert "".join("".join(text.split()).split()).count("load_batch") == 2


def test_brackets_are_no_markup() -> None:
    assert "[red]" in render(verdict(finding(summary="group [red] waits")))


def test_other_causes_and_consequences_are_told_apart() -> None:
    other = finding(culprits=[5], victims=[6], summary="rank 5 died of SIGKILL", source="a.py:3")
    follows = finding(root_cause=False, summary="rank 7 waits too")
    text = render(verdict(finding(), other, follows))
    assert (
        "Also wrong, independently\n  - rank 5 died of SIGKILL (a.py:3). It holds up rank 6."
        in text
    )
    assert "Also found\n  - rank 7 waits too" in text


def test_print_lists_a_hazard_of_a_healthy_job() -> None:
    hazard = finding(kind="hazard", root_cause=False, summary="nobody waited for a broadcast")
    healthy = Verdict(kind="healthy", findings=[hazard])
    assert "Latent faults\n  - nobody waited for a broadcast" in str(healthy)


def test_long_lists_are_cut_and_say_so() -> None:
    text = render(verdict(finding(), missing_evidence=[f"File {i} is damaged." for i in range(30)]))
    assert "22 more; --json lists them all." in text


def test_what_would_raise_the_confidence_is_said() -> None:
    text = render(
        verdict(
            finding(
                confidence="low", would_raise_confidence="A dump of the other node would show it."
            )
        )
    )
    assert "Confidence: low. A dump of the other node would show it." in " ".join(text.split())


def test_healthy() -> None:
    text = render(Verdict(summary="nothing is wrong", looked_at="2 ranks"))
    assert text == "VERDICT  nothing is wrong.\n\nLooked at 2 ranks.\n"


def test_json_follows_the_schema() -> None:
    out = io.StringIO()
    print_json(verdict(finding(), finding(collective=CollectiveRef("recv", 3, 1), group=None)), out)
    decoded = msgspec.json.decode(out.getvalue())
    jsonschema.Draft202012Validator.check_schema(schema())
    jsonschema.validate(decoded, schema())
    assert decoded["schema"] == "commlens.verdict/2"
    assert decoded["kind"] == decoded["findings"][0]["kind"] == "missing"
    assert "peer" not in decoded["collective"]


def test_the_schema_knows_every_kind_and_why() -> None:
    from typing import get_args

    from commlens.model import verdict as model

    finding = schema()["$defs"]["Finding"]["properties"]
    for properties in (finding, schema()["properties"]):
        assert properties["kind"]["enum"] == sorted(get_args(model.Kind))
        assert properties["why"]["enum"] == sorted(get_args(model.Why))
    assert set(finding) == set(Finding.__struct_fields__)
    assert set(schema()["properties"]) == set(Verdict.__struct_fields__)
