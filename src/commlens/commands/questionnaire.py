"""The questions of ``commlens config``, and the text of the settings file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from commlens.config import ACCEPTED, NAMES, Settings


@dataclass(frozen=True)
class Question:
    """The question about one setting."""

    name: str
    question: str
    explanation: str  # one line; also the setting's comment in the file


QUESTIONS: Final = (
    Question(
        "debug",
        "Verify every collective before it is issued?",
        "A mismatched one then raises on every rank and nothing is sent. It costs time; `commlens"
        " launch --debug` does it for one run.",
    ),
    Question(
        "on_mismatch",
        "When ranks disagree, warn or abort?",
        "The watcher always compares the collectives that the ranks issue. `warn` prints the"
        " verdict; `abort` also ends the job.",
    ),
    Question(
        "stall_timeout",
        "After how many seconds is an unfinished collective a stall?",
        "The verdict is then printed: the rank, the collective and the line. `auto`: after 60, and"
        " sooner if the fault is certain.",
    ),
    Question(
        "on_stall",
        "When the job stalls, warn or abort?",
        "`warn` prints the verdict and lets the job go on; `abort` then ends it, which frees its"
        " machines.",
    ),
    Question(
        "dump_dir",
        "Where are dumps saved?",
        "One folder per job below it. A relative path starts from the directory in which the job is"
        " started.",
    ),
    Question(
        "keep_dumps",
        "How many jobs' dumps are kept?",
        "Older ones are removed. Files that commlens did not write are never touched.",
    ),
)
_YES_NO: Final = {"y": "yes", "n": "no"}


def ask(
    present: Settings, read: Callable[[str], str], say: Callable[[str], None]
) -> dict[str, Any]:
    """Ask every question, with the present values as the defaults, and return the answers by
    setting.

    ``read`` shows a prompt and returns a line; its EOFError and KeyboardInterrupt are passed on.
    """
    answers: dict[str, Any] = {}
    for question in QUESTIONS:
        value = getattr(present, question.name)
        say(f"\n{question.question}\n  {question.explanation}")
        while True:
            text = read(f"  {question.name} [{shown(value)}]: ").strip()
            if not text:
                answers[question.name] = value
                break
            is_switch = isinstance(value, bool)
            try:
                answers[question.name] = ACCEPTED[question.name].parse(
                    _YES_NO.get(text.lower(), text) if is_switch else text
                )
                break
            except (ValueError, TypeError, OverflowError):
                say(
                    "  That is not accepted. Enter"
                    f" {'yes or no' if is_switch else ACCEPTED[question.name].words}."
                )
    return answers


def settings_file(answers: Mapping[str, Any], kept: Mapping[str, Any]) -> str:
    """Return the text of the settings file.

    Args:
        answers: to the questions, by setting.
        kept: the settings of the previous file; those without a question are kept.
    """
    lines = [
        "# Settings of commlens, written by `commlens config`. Run it again to change them.",
        (
            "# COMMLENS_* variables and the command line override this file; `commlens config show`"
            " prints the settings in force."
        ),
    ]
    for question in QUESTIONS:
        lines += [
            "",
            f"# {question.question}",
            f"# {question.explanation}",
            _line(question.name, answers[question.name]),
        ]
    others = [name for name in NAMES if name in kept and name not in answers]
    if others:
        lines += [
            "",
            "# Kept from the previous file:",
            *(_line(name, kept[name]) for name in others),
        ]
    return "\n".join(lines) + "\n"


def shown(value: Any) -> str:
    """Return a value as YAML would write it; ``-`` for None."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _line(name: str, value: Any) -> str:
    import yaml

    if value is None:
        return f"{name}:"
    plain = int(value) if isinstance(value, float) and value.is_integer() else value
    text: str = yaml.safe_dump({name: plain}, allow_unicode=True, width=10_000)
    return text.rstrip("\n")
