"""The questions of ``commlens config``, and the text of the file that their answers make."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from commlens.config import ACCEPTED, NAMES, Settings


@dataclass(frozen=True)
class Question:
    """What is asked about one setting."""

    name: str
    question: str
    explanation: str  # in a line; it becomes the setting's comment in the file


QUESTIONS: Final = (
    Question(
        "debug",
        "Verify every collective before it is issued?",
        "A bad one then raises on every rank and nothing is sent. For debugging: it costs time. `commlens launch --debug` does it once.",
    ),
    Question(
        "on_mismatch",
        "When ranks are seen to disagree, warn or abort?",
        "Without verifying, too, the watcher compares what the ranks issue. `abort` ends the job; `warn` only says so.",
    ),
    Question(
        "stall_timeout",
        "After how many seconds is a collective that nobody completes a stall?",
        "Then the verdict is printed: which rank, which collective, which line. Above what your slowest healthy step takes.",
    ),
    Question(
        "on_stall",
        "When the job stalls, warn or abort?",
        "`abort` ends the job after the verdict, and frees its machines; `warn` lets it go on, should it be able to.",
    ),
    Question(
        "dump_dir",
        "Where do dumps go?",
        "One folder for each job below it. A path that does not begin with / counts from where the job is started.",
    ),
    Question(
        "keep_dumps",
        "How many jobs' dumps are kept there?",
        "Older ones are removed; what commlens did not write is never touched.",
    ),
)
_YES_NO: Final = {"y": "yes", "n": "no"}


def ask(present: Settings, read: Callable[[str], str], say: Callable[[str], None]) -> dict[str, Any]:
    """Ask about each of them, the present values being the defaults.

    Args:
        present: the values that an empty answer keeps.
        read: shows a prompt and returns a line; its EOFError and KeyboardInterrupt are the caller's.
        say: prints a line.

    Returns:
        The answers by setting.
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
                answers[question.name] = ACCEPTED[question.name].parse(_YES_NO.get(text.lower(), text) if is_switch else text)
                break
            except (ValueError, TypeError, OverflowError):
                say(f"  That is not accepted: it takes {'yes or no' if is_switch else ACCEPTED[question.name].words}.")
    return answers


def settings_file(answers: Mapping[str, Any], kept: Mapping[str, Any]) -> str:
    """The file's text.

    Args:
        answers: what was asked.
        kept: settings that stood in the file before and are not asked about.
    """
    lines = [
        "# Settings of commlens, written by `commlens config`, which can be run again.",
        "# COMMLENS_* variables and the command line win over this file; `commlens config show` prints what is in force.",
    ]
    for question in QUESTIONS:
        lines += ["", f"# {question.question}", f"# {question.explanation}", _line(question.name, answers[question.name])]
    others = [name for name in NAMES if name in kept and name not in answers]
    if others:
        lines += ["", "# Not asked about, as they were:", *(_line(name, kept[name]) for name in others)]
    return "\n".join(lines) + "\n"


def shown(value: Any) -> str:
    """A value as it would be written in YAML; ``-`` for none."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _line(name: str, value: Any) -> str:
    """``name: value`` as YAML reads it back."""
    import yaml

    if value is None:
        return f"{name}:"
    plain = int(value) if isinstance(value, float) and value.is_integer() else value
    text: str = yaml.safe_dump({name: plain}, allow_unicode=True, width=10_000)
    return text.rstrip("\n")
