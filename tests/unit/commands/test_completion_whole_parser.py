"""All that stands after the program is the program's, whatever it is called; before it, options are
not abbreviated.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import pytest

from commlens.commands import COMMANDS, main, preview
from commlens.commands.completion import whole_parser
from commlens.launch import torchrun, trace_worker, worker

LIKE_OURS = [
    "--metric",
    "acc",
    "--metrics",
    "--dump=x",
    "--on",
    "--box",
    "--c",
    "--stall",
    "5",
    "--nproc",
    "2",
    "-mr",
    "--lr",
    "-1e-3",
    "-x y",
    "",
    "a",
]
"""Arguments whose names begin like options of commlens or torchrun, and some that argparse might
take for something else.
"""

VERBS = {
    "launch": (["--nproc-per-node", "2", "--trace=2:4", "--debug"], "--stall-timeout"),
    "run": (["--debug", "--box-entries=9"], "--stall-timeout"),
    "trace": (["--steps", "1:2", "--no-summary"], "--depth"),
    "preview": (["--world-size", "8", "--rank", "3"], "--fake-tensors"),
}
"""Verb to some options for it, and to another one of its own options."""

Passed = Callable[..., tuple[list[str], bool]]
Capture = pytest.CaptureFixture[str]


class Started(Exception):
    """The command would start the program now."""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.touch()
    return str(path)


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> Passed:
    """Return a function that calls a command, and returns the program that it starts and whether
    that is a module.
    """
    found: list[tuple[list[str], bool]] = []

    def start(
        program: list[str],
        arguments: argparse.Namespace | None = None,
        *_: object,
        module: bool = False,
        **__: object,
    ) -> None:
        found.append((list(program), module if arguments is None else arguments.module))
        raise Started

    parse = torchrun.parse

    def parse_and_stop(argv: list[str]) -> None:
        arguments = parse(argv)
        start([arguments.training_script, *arguments.training_script_args], module=arguments.module)

    monkeypatch.setattr(torchrun, "parse", parse_and_stop)
    monkeypatch.setattr(worker, "run", start)
    monkeypatch.setattr(trace_worker, "run", start)
    monkeypatch.setattr(preview, "_preview", start)

    def call(*arguments: str) -> tuple[list[str], bool]:
        with pytest.raises(Started):
            main(arguments)
        return found.pop()

    return call


@pytest.fixture(params=VERBS)
def verb(request: pytest.FixtureRequest) -> str:
    if request.param == "launch":
        pytest.importorskip("torch")
    name: str = request.param
    return name


@pytest.mark.parametrize("mark", [[], ["--"]], ids=["", "--"])
def test_a_script_gets_all_that_follows_it(
    verb: str, mark: list[str], script: str, passed: Passed, capsys: Capture
) -> None:
    options, _ = VERBS[verb]
    assert passed(verb, *options, *mark, script, *LIKE_OURS) == ([script, *LIKE_OURS], False)
    assert passed(verb, *options, *mark, script, "--", *LIKE_OURS) == (
        [script, "--", *LIKE_OURS],
        False,
    )
    assert passed(verb, *options, *mark, script) == ([script], False)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("mark", [[], ["--"]], ids=["", "--"])
def test_a_module_gets_all_that_follows_it(
    verb: str, mark: list[str], passed: Passed, capsys: Capture
) -> None:
    options, _ = VERBS[verb]
    assert passed(verb, *options, "-m", *mark, "pkg.train", *LIKE_OURS, "-m", "-h", "--help") == (
        ["pkg.train", *LIKE_OURS, "-m", "-h", "--help"],
        True,
    )
    assert capsys.readouterr().err == ""


def test_own_options_after_the_script_are_the_scripts_and_one_line_says_so(
    verb: str, script: str, passed: Passed, capsys: Capture
) -> None:
    options, own = VERBS[verb]
    assert passed(verb, *options, script, "--lr", "1", own, "5") == (
        [script, "--lr", "1", own, "5"],
        False,
    )
    assert (
        capsys.readouterr().err
        == f"commlens: {own} stands after train.py, so train.py gets it; to give it to commlens,"
        " put it before the script.\n"
    )
    assert passed(verb, "-m", *options, "pkg.train", f"{own}=5", own) == (
        ["pkg.train", f"{own}=5", own],
        True,
    )
    assert (
        capsys.readouterr().err
        == f"commlens: {own} stands after pkg.train, so pkg.train gets it; to give it to commlens,"
        " put it before -m.\n"
    )


def test_several_own_options_are_one_line(script: str, passed: Passed, capsys: Capture) -> None:
    passed("run", script, "--debug=sample", "--abort-on", "stall", "--debug", "--", "--timing")
    assert (
        capsys.readouterr().err
        == "commlens: --debug and --abort-on stand after train.py, so train.py gets them; "
        "to give them to commlens, put them before the script.\n"
    )


def test_two_dashes_before_the_script_leave_the_line_out(
    verb: str, script: str, passed: Passed, capsys: Capture
) -> None:
    _, own = VERBS[verb]
    options = ["--world-size", "8"] if verb == "preview" else []
    assert passed(verb, *options, "--", script, own) == ([script, own], False)
    assert capsys.readouterr().err == ""


def test_one_rank_says_it(
    script: str, passed: Passed, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("RANK", "1")
    passed("run", script, "--debug")
    assert capsys.readouterr().err == ""


def test_torchruns_options_after_the_script_need_no_line(
    script: str, passed: Passed, capsys: Capture
) -> None:
    pytest.importorskip("torch")
    assert passed("launch", script, "--nproc-per-node", "4", "--rank") == (
        [script, "--nproc-per-node", "4", "--rank"],
        False,
    )
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["launch", "--dump", "x"],
            (
                "commlens launch has no option '--dump'. Did you mean --dump-dir, --dump-mode or"
                " --dump-signal?"
            ),
        ),
        (
            ["launch", "--nproc", "2"],
            "commlens launch has no option '--nproc'. Did you mean --nproc-per-node?",
        ),
        (
            ["run", "--stall", "5"],
            "commlens run has no option '--stall'. Did you mean --stall-timeout?",
        ),
        (
            ["run", "--abort=all"],
            "commlens run has no option '--abort'. Did you mean --abort-on?",
        ),
        (
            ["trace", "--no-sum"],
            "commlens trace has no option '--no-sum'. Did you mean --no-summary?",
        ),
        (
            ["preview", "--world-size", "2", "--fake"],
            "commlens preview has no option '--fake'. Did you mean --fake-tensors?",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_abbreviations_are_refused(
    arguments: list[str], message: str, script: str, capsys: Capture
) -> None:
    if arguments[0] == "launch":
        pytest.importorskip("torch")
    assert main([*arguments, script]) == 2
    assert capsys.readouterr().err == f"commlens: {message}\n"


def test_no_parser_accepts_abbreviations() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("shtab")

    def parsers(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
        below = [
            action.choices.values()
            for action in parser._actions
            if isinstance(action, argparse._SubParsersAction)
        ]
        return [parser, *(each for group in below for one in group for each in parsers(one))]

    found = parsers(whole_parser())
    assert len(found) > len(COMMANDS)
    assert [
        parser.prog for parser in [*found, torchrun.torchrun_parser()] if parser.allow_abbrev
    ] == []
