"""The command line itself. Each verb has tests of its own."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import subprocess
import sys

import pytest

from commlens import __version__, commands, errors
from commlens.commands import COMMANDS, main
from conftest import SOURCE, RunCommlens


@pytest.mark.launches
def test_help_names_every_verb(run_commlens: RunCommlens):
    done = run_commlens("--help", environ={"COLUMNS": "200"})
    assert done.returncode == 0
    for entry in COMMANDS:
        assert f"  {entry.name:<13}{entry.help}\n" in done.stdout


@pytest.mark.parametrize(
    "arguments", [["--help"], ["diagnose", "--help"], ["compare", "--help"]], ids=" ".join
)
def test_help_wraps_to_the_terminal(arguments, monkeypatch, capsys):
    counts = []
    for columns in (50, 100, 150):
        monkeypatch.setenv("COLUMNS", str(columns))
        with contextlib.suppress(SystemExit):
            main(arguments)
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= columns
        counts.append(len(lines))
    assert counts == sorted(counts, reverse=True) and counts[0] > counts[1]


@pytest.mark.launches
@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--version"], ["diagnose", "--help"], ["convert", "--help"]],
    ids=" ".join,
)
def test_help_and_version_import_nothing_heavy(arguments):
    program = (
        "import atexit, os, sys\nheavy = {'torch', 'rich', 'numpy', 'msgspec', 'yaml', 'inspect',"
        " 'fsspec', 'zstandard', 'asyncio'}\natexit.register(lambda: os._exit(9) if heavy &"
        " set(sys.modules) else None)\nfrom commlens.commands import main;"
        f" sys.exit(main({arguments!r}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("entry", COMMANDS, ids=lambda entry: entry.name)
def test_a_commands_class_matches_the_list(entry):
    module = importlib.import_module(f"commlens.commands.{entry.module}")
    kind = getattr(module, entry.class_name)
    summary = (inspect.getdoc(kind) or "").partition("\n\n")[0]
    assert summary.replace("\n", " ") == entry.help
    assert entry.help.endswith(".")


@pytest.mark.parametrize("entry", COMMANDS, ids=lambda entry: entry.name)
def test_every_command_has_help(entry, capsys):
    if entry.name == "launch":
        pytest.importorskip("torch")  # it shows torchrun's options
    try:
        status = main([entry.name, "--help"])
    except SystemExit as end:
        status = end.code
    assert status == 0
    assert f"commlens {entry.name}" in capsys.readouterr().out


@pytest.mark.launches
def test_no_command_shows_the_help_and_is_wrong_usage(run_commlens: RunCommlens):
    done = run_commlens()
    assert done.returncode == 2 and done.stdout == "" and "commlens demo" in done.stderr


@pytest.mark.parametrize("arguments", [["--version"], ["-V"]])
def test_version(arguments, capsys):
    assert main(arguments) == 0
    assert capsys.readouterr().out == f"commlens {__version__}\n"


def test_a_misspelt_command_gets_a_suggestion(capsys):
    assert main(["dignose"]) == 2
    assert (
        capsys.readouterr().err
        == "commlens: commlens has no command 'dignose'. Did you mean diagnose?\n"
    )


def test_an_unknown_option_is_named(capsys):
    assert main(["--frobnicate"]) == 2
    assert "no option '--frobnicate'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["diagnose", "--jso", "x"],
            "commlens diagnose has no option '--jso'. Did you mean --json?",
        ),
        (
            ["run", "--stal-timeout", "5", "t.py"],
            "commlens run has no option '--stal-timeout'. Did you mean --stall-timeout?",
        ),
        (
            ["launch", "--stal-timeout=5", "t.py"],
            "commlens launch has no option '--stal-timeout'. Did you mean --stall-timeout?",
        ),
        (
            ["trace", "--frobnicate", "t.py"],
            (
                "commlens trace has no option '--frobnicate'. `commlens trace --help` shows how to"
                " call it."
            ),
        ),
        (
            ["convert", "--to", "csvv", "-o", "x", "y"],
            (
                "--to does not accept 'csvv'. Did you mean csv? It takes fr-pickle, fr-json,"
                " perfetto, parquet, csv."
            ),
        ),
        (["config", "shw"], "commlens config takes show, not 'shw'. Did you mean show?"),
        (
            ["dump", "a", "b"],
            (
                "commlens dump takes no argument 'b' there. `commlens dump --help` shows how to"
                " call it."
            ),
        ),
        (
            ["completion"],
            (
                "commlens completion needs one of bash, zsh, fish. `commlens completion --help`"
                " shows how to call it."
            ),
        ),
        (
            ["attach", "--window"],
            "--window needs a value. `commlens attach --help` shows how to call it.",
        ),
        (
            ["stacks", "--all=3"],
            (
                "--all takes no value, but was given '3'. `commlens stacks --help` shows how to"
                " call it."
            ),
        ),
        (
            ["run", "--debug=smaple", "t.py"],
            "--debug does not accept 'smaple'. Did you mean sample? It takes sample, or no value.",
        ),
        (
            ["view", "--json", "--events"],
            (
                "--events and --json cannot be used together. `commlens view --help` shows how to"
                " call it."
            ),
        ),
        (
            ["launch", "--debug=smaple", "t.py"],
            "--debug does not accept 'smaple'. Did you mean sample? It takes sample, or no value.",
        ),
        (
            ["launch", "--nproc-per-node", "2"],
            "Which program? For example: commlens launch --nproc-per-node 8 train.py --lr 0.1",
        ),
        (
            ["launch", "--debug", "nope.py", "--lr", "1"],
            "The program nope.py cannot be read: there is no such file.",
        ),
        (
            ["launch", "--check-numbers", "every 1 steps", "t.py"],
            "The program every 1 steps cannot be read: there is no such file. If it is the value"
            " of --check-numbers, write '--check-numbers=every 1 steps'.",
        ),
        (
            ["launch", "--trace", "2:4", "t.py"],
            "The program 2:4 cannot be read: there is no such file. If it is the value of --trace,"
            " write --trace=2:4.",
        ),
        (
            ["run", "--debug", "sample", "t.py"],
            "The program sample cannot be read: there is no such file. If it is the value of"
            " --debug, write --debug=sample.",
        ),
        (
            ["launch", "--check-numbers", "every-1.py"],
            "The program every-1.py cannot be read: there is no such file.",
        ),
        (
            ["launch", "--no-python", "nope"],
            "The command nope cannot be run: there is no such executable file.",
        ),
        (
            ["compare"],
            "commlens compare needs BEFORE, AFTER. `commlens compare --help` shows how to call it.",
        ),
        (
            ["view", "--rank", "x", "y"],
            "--rank: 'x' is not a number. `commlens view --help` shows how to call it.",
        ),
        (
            ["launch", "--nproc-per-node", "abc", "t.py"],
            "--nproc-per-node takes a number of workers, auto, cpu, gpu or xpu, not 'abc'.",
        ),
        (
            ["launch", "--nproc-per-node=0", "t.py"],
            "--nproc-per-node takes a number of workers from 1 on, not 0.",
        ),
        (
            ["launch", "--nnodes", "two", "t.py"],
            "--nnodes takes a number of nodes, such as 2, or MIN:MAX, such as 2:4, not 'two'.",
        ),
        (
            ["launch", "--debug", "--", "/usr/bin/torchrun", "--nproc-per-node", "2", "t.py"],
            (
                "commlens launch takes the place of torchrun: leave it out, as in `commlens launch"
                " --nproc-per-node 2 t.py`."
            ),
        ),
        (
            ["run", "torchrun", "--nproc-per-node", "2", "t.py"],
            (
                "commlens run starts one worker, and torchrun is a launcher: `commlens launch"
                " --nproc-per-node 2 t.py` takes its options and records its workers."
            ),
        ),
        (
            ["run", "-m", "torch.distributed.run", "t.py"],
            (
                "commlens run starts one worker, and torch.distributed.run is a launcher: `commlens"
                " launch t.py` takes its options and records its workers."
            ),
        ),
        (
            ["run", "accelerate", "launch", "t.py"],
            (
                "commlens run starts one worker, and accelerate is a launcher: it starts them, as"
                " in `accelerate launch -m commlens run train.py`."
            ),
        ),
        (
            ["run", "python3", "t.py", "--lr", "1"],
            "commlens run starts Python itself: `commlens run t.py --lr 1`.",
        ),
        (
            ["demo", "stoped"],
            (
                "There is no scenario 'stoped'. Did you mean stopped? `commlens demo --list` lists"
                " them."
            ),
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage_is_one_sentence_and_exit_status_2(arguments, message, capsys):
    if arguments[0] == "launch":
        pytest.importorskip("torch")
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", f"commlens: {message}\n")


def test_a_file_in_the_place_of_a_command_gets_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "dump.pkl"):
        (tmp_path / name).write_text("")
    assert main(["train.py", "--lr", "1"]) == 2
    assert (
        capsys.readouterr().err
        == "commlens: commlens needs a command before 'train.py': `commlens launch train.py` runs"
        " it.\n"
    )
    assert main(["dump.pkl"]) == 2
    assert "`commlens diagnose dump.pkl` diagnoses a dump" in capsys.readouterr().err


class Failing:
    """Raise what the test wants."""

    name = "status"

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def add_arguments(self, parser):
        parser.add_argument("program", nargs="*")

    def run(self, arguments):
        raise self.error


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.CommandError("No such job."), 2),
        (errors.CommandError("No such job.", exit_code=7), 7),
        (errors.EvidenceError("Nothing to read."), 3),
        (errors.ConfigError("No such key."), 2),
        (errors.FormatError("Not a box."), 2),
        (errors.MissingDependency("Needs torch."), 2),
    ],
)
def test_an_error_is_one_line_and_an_exit_status(error, status, monkeypatch, capsys):
    monkeypatch.setattr(commands.Entry, "load", lambda entry: Failing(error))
    assert main(["status"]) == status
    captured = capsys.readouterr()
    assert captured.err == f"commlens: {error}\n" and captured.out == ""


def test_an_interrupt_is_quiet(monkeypatch, capsys):
    monkeypatch.setattr(commands.Entry, "load", lambda entry: Failing(KeyboardInterrupt()))
    assert main(["status"]) == 130
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("error", [KeyboardInterrupt(), BrokenPipeError()])
def test_exceptions_of_the_users_program_pass_through_run(error, monkeypatch):
    monkeypatch.setattr(commands.Entry, "load", lambda entry: Failing(error))
    with pytest.raises(type(error)):
        main(["run", "script.py"])


@pytest.mark.launches
def test_a_closed_pipe_is_quiet():
    command = f"{sys.executable} -m commlens config show | true"
    done = subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )
    assert done.stderr == ""


def test_status_of_a_job_without_a_readable_box_is_an_empty_table(tmp_path, monkeypatch, capsys):
    folder = tmp_path / f"commlens-{os.getuid()}" / "emptyjob"
    folder.mkdir(parents=True)
    (folder / "rank0.123.box").write_bytes(os.urandom(100))
    monkeypatch.setenv("COMMLENS_BOX_DIR", str(tmp_path))
    assert main(["status"]) == 0
    assert "emptyjob: 0 ranks" in capsys.readouterr().out
