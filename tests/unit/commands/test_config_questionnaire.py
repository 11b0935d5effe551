"""``commlens config``: what it asks, at a real terminal, and what it writes."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from commlens.commands.config import QUESTIONS, ask, settings_file
from commlens.config import ACCEPTED, Settings, load_settings
from conftest import SOURCE, RunCommlens

pytestmark = pytest.mark.launches

TERMINAL = (
    "import fcntl, signal, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0);"
    " signal.signal(signal.SIGINT, signal.default_int_handler); from commlens.commands import main;"
    " sys.exit(main(sys.argv[1:]))"
)
"""Takes the terminal as its own first, so that Ctrl-C reaches it, and heeds it even if the tests
run in the background of a shell.
"""


def at_a_terminal(
    home: Path, answers: str, *arguments: str, interrupt_at: str = "", **environ: str
) -> tuple[int, str]:
    """Type the answers to ``commlens config``, and interrupt it at a prompt. Returns its exit
    status and what stood on the screen.
    """
    master, slave = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "XDG_CONFIG_HOME": str(home), **environ}
    process = subprocess.Popen(
        [sys.executable, "-c", TERMINAL, "config", *arguments],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=environment,
        close_fds=True,
        start_new_session=True,
    )
    os.close(slave)
    typed = False
    screen = b""
    pressed = 0.0
    end = time.monotonic() + 20
    while time.monotonic() < end:
        # at the first question: what is typed before anybody reads may be lost
        if not typed and b" [" in screen:
            typed = True
            os.write(master, answers.encode())
        heard = b"Nothing was written." in screen
        if (
            interrupt_at
            and interrupt_at.encode() in screen
            and not heard
            and time.monotonic() > pressed + 3
            and process.poll() is None
        ):
            # Again after a while: Python hears of one only once it reads, which is a moment after
            # the prompt. One that comes when it has heard would end it in another way.
            pressed = time.monotonic()
            process.send_signal(signal.SIGINT)
        if not select.select([master], [], [], 0.05)[0]:
            if process.poll() is not None:
                break
            continue
        try:
            chunk = os.read(master, 65536)
        except OSError:  # the other side is closed
            break
        if not chunk:
            break
        screen += chunk
    try:
        status = process.wait(10)
    finally:
        process.kill()
        process.wait()
        os.close(master)
    return status, screen.decode(errors="replace").replace("\r\n", "\n")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def written(home: Path) -> Path:
    return home / "commlens" / "config.yaml"


def test_answers_are_written_with_their_comments_and_read_back(home: Path):
    status, screen = at_a_terminal(home, "y\nsoon\n30\nmismatch\n/scratch/my dumps\n5\n")
    assert status == 0, screen
    assert "That is not accepted. Enter auto, or a number of seconds above 0." in screen
    assert "debug [no]: " in screen
    for question in QUESTIONS.values():
        assert question.question in screen and question.explanation in screen
        assert f"# {question.explanation}" in written(home).read_text()
    resolved = load_settings(environ={"XDG_CONFIG_HOME": str(home)})
    expected = Settings(
        debug=True,
        abort_on="mismatch",
        stall_timeout=30.0,
        dump_dir="/scratch/my dumps",
        keep_dumps=5,
    )
    assert resolved.settings == expected
    assert {resolved.origins[name] for name in QUESTIONS} == {str(written(home))}
    assert f"Wrote {written(home)}" in screen


def test_run_again_the_files_values_are_the_defaults_and_the_rest_stays(home: Path):
    written(home).parent.mkdir(parents=True)
    written(home).write_text("stall_timeout: 7.5\nbox_entries: 99\nabort_on: stall\n")
    status, screen = at_a_terminal(home, "\n\n\n\n\ny\n")
    assert status == 0 and "stall_timeout [7.5]" in screen and "abort_on [stall]" in screen
    expected = Settings(stall_timeout=7.5, box_entries=99, abort_on="stall")
    assert load_settings(environ={"XDG_CONFIG_HOME": str(home)}).settings == expected


@pytest.mark.parametrize("answer", ["\n", "n\n", "\x04"])
def test_a_file_is_not_overwritten_without_a_yes(home: Path, answer: str):
    written(home).parent.mkdir(parents=True)
    written(home).write_text("stall_timeout: 7\n")
    status, screen = at_a_terminal(home, "\n9\n\n\n\n" + answer)
    assert status != 0 and "Nothing was written." in screen
    assert written(home).read_text() == "stall_timeout: 7\n"


def test_force_does_not_ask(home: Path):
    written(home).parent.mkdir(parents=True)
    written(home).write_text("stall_timeout: 7\n")
    status, screen = at_a_terminal(home, "\n9\n\n\n\n", "--force")
    assert status == 0 and "Overwrite" not in screen
    assert load_settings(environ={"XDG_CONFIG_HOME": str(home)}).settings.stall_timeout == 9


def test_leaving_in_the_middle_writes_nothing(home: Path):
    status, screen = at_a_terminal(home, "y\n", interrupt_at="stall_timeout [")
    assert status == 130 and "Nothing was written." in screen and not written(home).exists()


def test_an_override_of_an_answer_is_reported(home: Path):
    status, screen = at_a_terminal(home, "n\n\n\n\n\n", ACCELERATE_DEBUG_MODE="1")
    assert status == 0
    assert "debug is still true here, because ACCELERATE_DEBUG_MODE overrides the file." in screen


def test_without_a_terminal_it_says_which_command_to_use(run_commlens: RunCommlens, home: Path):
    # standard input is no terminal here
    done = run_commlens("config", environ={"XDG_CONFIG_HOME": str(home)})
    assert done.returncode == 2 and done.stdout == "" and not written(home).exists()
    assert (
        "standard input is not a terminal" in done.stderr and "commlens config --yes" in done.stderr
    )


def test_yes_asks_nothing_and_overwrites_nothing(run_commlens: RunCommlens, home: Path):
    environ = {"XDG_CONFIG_HOME": str(home)}
    done = run_commlens("config", "--yes", environ=environ)
    assert done.returncode == 0, done.stderr
    assert load_settings(environ=environ).settings == Settings()
    before = written(home).read_text()
    done = run_commlens("config", "--yes", environ=environ)
    assert done.returncode == 2 and "--force" in done.stderr and written(home).read_text() == before
    assert run_commlens("config", "--yes", "--force", environ=environ).returncode == 0


def test_a_named_file_is_written(run_commlens: RunCommlens, home: Path, tmp_path: Path):
    done = run_commlens(
        "config", "--yes", "--config-file", "mine.yaml", environ={"XDG_CONFIG_HOME": str(home)}
    )
    assert done.returncode == 0 and "COMMLENS_CONFIG_FILE=mine.yaml" in done.stdout
    assert (tmp_path / "mine.yaml").exists() and not written(home).exists()
    for arguments in (
        ["--config-file", "mine.yaml", "show"],
        ["show", "--config-file", "mine.yaml"],
    ):
        assert (
            "mine.yaml"
            in run_commlens("config", *arguments, environ={"XDG_CONFIG_HOME": str(home)}).stdout
        )


def test_a_broken_file_is_replaced_by_force_only(run_commlens: RunCommlens, home: Path):
    written(home).parent.mkdir(parents=True)
    written(home).write_text("colour: [red\n")
    environ = {"XDG_CONFIG_HOME": str(home)}
    assert run_commlens("config", "--yes", environ=environ).returncode == 2
    assert run_commlens("config", "--yes", "--force", environ=environ).returncode == 0
    assert load_settings(environ=environ).settings == Settings()


@pytest.mark.parametrize(
    "value",
    [
        "on",
        "null",
        "12",
        "a: b",
        "#x",
        "it's",
        "dä/ö",
        "~/x",
        " x",
        "a\\b",
        '"q"',
        "@x",
        "- x",
        "1e3",
    ],
)
def test_yaml_reads_every_answer_back(value: str):
    answers = {name: getattr(Settings(), name) for name in QUESTIONS}
    content = yaml.safe_load(
        settings_file({**answers, "dump_dir": value}, {"dump_signal": "SIGUSR2", "box_dir": value})
    )
    assert (content["dump_dir"], content["box_dir"], content["dump_signal"]) == (
        value,
        value,
        "SIGUSR2",
    )


def test_every_question_is_about_a_setting_and_takes_its_default():
    answers = ask(Settings(), lambda prompt: "", lambda line: None)
    assert answers == {name: getattr(Settings(), name) for name in QUESTIONS}
    assert all(not ACCEPTED[name].internal for name in answers)
