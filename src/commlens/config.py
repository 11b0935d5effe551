"""Settings: their values and where each value came from.

From lowest to highest priority: defaults, a YAML file, the environment (torch's and Accelerate's
variables, then ``COMMLENS_*``), the command line or arguments in code. docs/settings.md explains
each setting.

Standard library only, because the training process imports it; PyYAML is imported only to read a
file.
"""

from __future__ import annotations

import math
import os
import re
import signal
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final

from commlens.blackbox.layout import CAPACITY_MAX
from commlens.errors import ConfigError, MissingDependency, did_you_mean
from commlens.model.number_checks import parse_number_checks
from commlens.model.steps import parse_steps

SWITCH: Final = "COMMLENS"
"""The variable that enables recording in a worker."""

DEBUG_VARIABLE: Final = "COMMLENS_DEBUG_MODE"
"""The variable of the setting ``debug``, named like Accelerate's."""

ACCELERATE_VARIABLE: Final = "ACCELERATE_DEBUG_MODE"
"""Accelerate's variable for verifying operations. With commlens enabled, it enables ``debug`` for
all operations.
"""

SAMPLE: Final = "sample"
"""The value of the setting ``debug`` that verifies a part of the collectives."""

# values that Accelerate 1.15 accepts
_ACCELERATE_ON: Final = frozenset({"1", "y", "yes", "t", "true", "on"})

CONFIG_FILE_VARIABLE: Final = "COMMLENS_CONFIG_FILE"
WARNED_VARIABLE: Final = "COMMLENS_WARNED"
"""Marks the warnings that a parent process has printed."""
PREFIX: Final = "COMMLENS_"
RECORDER_VARIABLES: Final = ("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE")
"""Torch's variables for the size of its recorder, the newer name last."""

RECORDER_ENTRIES: Final = 2000
"""The size that commlens gives torch's recorder, which is torch's own default where the recorder is
on by default.
"""

RECORDER_MARK: Final = "COMMLENS_RECORDER_SET"
"""Marks that commlens, not the user, set that size: it says nothing about the user's wishes."""

NOT_SETTINGS: Final = frozenset(
    {
        RECORDER_MARK,
        CONFIG_FILE_VARIABLE,
        WARNED_VARIABLE,
        "COMMLENS_TEST_DATA",
        "COMMLENS_UPDATE_GOLDEN",
        "COMMLENS_TEST_NATIVE",
        "COMMLENS_TEST_TREE_ARITY",
        "COMMLENS_NATIVE_DIR",
        "COMMLENS_BUILD_NATIVE",
        "COMMLENS_NCCL_EVENTS",
        "COMMLENS_NCCL_FOLDER",
    }
)
"""``COMMLENS_*`` variables that are not settings."""

DEFAULT: Final = "default"
_ON: Final = ("1", "true", "yes", "on")
_OFF: Final = ("0", "false", "no", "off")
AUTO: Final = "auto"
NOTHING: Final = "nothing"
ALL: Final = "all"
NCCL_LEVELS: Final = ("calls", "kernels", "transfers")
"""How much NCCL tells of itself, by its profiler plugin."""
FAULTS: Final = ("stall", "mismatch", "diverged")
"""The faults after which the setting ``abort_on`` may end the job."""
STALL_CEILING_S: Final = 60.0
"""The longest stall timeout that is learned from a job."""
COMMAND_LINE: Final = "command line"


# --- what each setting accepts


def _refuse(value: Any) -> Any:
    raise ValueError


def _words(
    values: Mapping[str, Any], parse: Callable[[Any], Any] = _refuse
) -> Callable[[Any], Any]:
    """Accept these words as their values, and else what ``parse`` accepts."""

    def parse_words(value: Any) -> Any:
        word = str(value).strip().lower()  # YAML reads off as a boolean
        return values[word] if word in values else parse(value)

    return parse_words


def _engine(value: Any) -> str:
    if value not in ("auto", "python", "native"):
        raise ValueError
    return str(value)


_boolean: Final = _words({**dict.fromkeys(_ON, True), **dict.fromkeys(_OFF, False)})


def _path(value: Any) -> str:
    if not isinstance(value, (str, os.PathLike)) or not str(value).strip() or "\0" in str(value):
        raise ValueError
    return os.path.expanduser(str(value))  # noqa: PTH111 - Path would drop the last slash of a prefix


def _absolute_path(value: Any) -> str:
    return absolute(_path(value))


def _integer(low: int, high: int) -> Callable[[Any], int]:
    def parse(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, (int, str)):
            raise ValueError
        number = int(value)
        if not low <= number <= high:
            raise ValueError
        return number

    return parse


def _mode(value: Any) -> str:
    text = str(value).strip()
    if isinstance(value, int) and 0o600 <= value <= 0o666:
        text = f"{value:o}"  # YAML reads 0640 as an octal number
    if not re.fullmatch("0{0,2}6[0246][0246]", text):
        raise ValueError
    return f"0{text[-3:]}"


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError
    number = float(value)
    if not (math.isfinite(number) and 0 < number <= 1e9):
        raise ValueError
    return number


def _signal(value: Any) -> str:
    name = str(value).strip().upper()
    name = name if name.startswith("SIG") else f"SIG{name}"
    if name not in signal.Signals.__members__ or name in ("SIGKILL", "SIGSTOP"):
        raise ValueError
    return name


def _steps(value: Any) -> str:
    text = str(value).strip()
    parse_steps(text)
    return text


def _command(value: Any) -> str:
    if callable(value):  # of a module that another process can import
        name = f"{value.__module__}:{value.__qualname__}"
        if value.__module__ == "__main__" or "<" in name:
            raise ValueError
        return name
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise ValueError
    return value.strip()


def _job(value: Any) -> str:
    text = str(value)
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}", text):
        raise ValueError
    return text


def _faults(value: Any) -> str:
    text = str(value).strip().lower()
    words = FAULTS if text == ALL else [word.strip() for word in text.split(",")]
    if text != NOTHING and not set(words) <= set(FAULTS):
        raise ValueError
    return ",".join(words)


# --- the settings


@dataclass(frozen=True)
class Accepts:
    """A setting besides its name and default: its values, its option and its question."""

    parse: Callable[[Any], Any]  # from text or a YAML type; raises ValueError
    words: str  # the accepted values, in error messages
    metavar: str = ""  # of the option's value; empty: a switch, which ``--no-...`` turns off
    help: str = ""  # of the option; empty: the setting has none
    question: str = ""  # of ``commlens config``; empty: it does not ask about the setting
    explanation: str = ""  # one line; also the setting's comment in the file
    internal: bool = False  # set by the launcher or by torch's variables, not by users


def _setting(default: Any, parse: Callable[[Any], Any], words: str, **more: Any) -> Any:
    return field(default=default, metadata={"accepts": Accepts(parse, words, **more)})


_SWITCH_WORDS: Final = "1 or 0 (true, false, yes, no, on, off)"


@dataclass(frozen=True)
class Settings:
    """All settings with their defaults. Names are YAML keys; the environment variable is
    ``COMMLENS_<NAME>``. Options, questions and errors are made of this table.
    """

    # folder of the black boxes; None: /dev/shm, else another memory-backed folder
    box_dir: str | None = _setting(
        None,
        _path,
        "a folder",
        metavar="DIR",
        help="put the black boxes here (default: shared memory)",
    )
    box_entries: int = _setting(
        2000,
        _integer(0, CAPACITY_MAX),
        f"an integer from 0 (no recording) to {CAPACITY_MAX}",
        metavar="N",
        help="keep this many collectives per rank (default 2000; 0 records nothing)",
    )
    debug: bool | str = _setting(
        False,
        _words({SAMPLE: SAMPLE}, _boolean),
        f"{_SWITCH_WORDS}, or {SAMPLE}",
        help=(
            "verify every collective across ranks before it is issued, and refuse a mismatch on"
            " all of them"
        ),
        question="Verify every collective before it is issued?",
        explanation=(
            "A mismatched one then raises on every rank and nothing is sent. It costs time;"
            " `commlens launch --debug` does it for one run."
        ),
    )
    verify_timeout: float | None = _setting(
        None,
        _seconds,
        "a number of seconds above 0",
        metavar="SECONDS",
        help=(
            "how long a rank may be silent during verification (default: the process group's"
            " timeout)"
        ),
    )
    # auto: the watcher learns the seconds from the job, at most STALL_CEILING_S
    stall_timeout: float | str = _setting(
        AUTO,
        _words({AUTO: AUTO}, _seconds),
        "auto, or a number of seconds above 0",
        metavar="SECONDS",
        help=(
            "print the verdict after a rank has waited this long in a collective (default auto:"
            " 60, or less if the fault is certain)"
        ),
        question="After how many seconds is an unfinished collective a stall?",
        explanation=(
            "The verdict is then printed: the rank, the collective and the line. `auto`: after 60,"
            " and sooner if the fault is certain."
        ),
    )
    abort_on: str = _setting(
        NOTHING,
        _faults,
        f"{NOTHING}, {ALL}, or some of {', '.join(FAULTS)} with commas between them",
        metavar="FAULTS",
        help=(
            f"end the job after these faults: {', '.join(FAULTS)} or {ALL} (default {NOTHING}:"
            " print the verdict, and the job goes on)"
        ),
        question="After which faults is the job ended?",
        explanation=(
            "`nothing`: the verdict is printed, and the job goes on. `all`, or `stall`,"
            " `mismatch`, `diverged` with commas: the job is ended, which frees its machines."
        ),
    )
    dump_dir: str = _setting(
        "commlens-dumps",
        _path,
        "a folder",
        metavar="DIR",
        help="save dumps here, in one folder per job (default commlens-dumps)",
        question="Where are dumps saved?",
        explanation=(
            "One folder per job below it. A relative path starts from the directory in which the"
            " job is started."
        ),
    )
    keep_dumps: int = _setting(
        10,
        _integer(1, 1_000_000),
        "an integer of at least 1",
        metavar="N",
        help="keep the dumps of this many jobs (default 10)",
        question="How many jobs' dumps are kept?",
        explanation="Older ones are removed. Files that commlens did not write are never touched.",
    )
    dump_mode: str = _setting(
        "0600",
        _mode,
        "the permissions of a file as octal digits, 0600 or more, such as 0640",
        metavar="MODE",
        help="the permissions of a dump's files (default 0600, with a folder of 0700)",
    )
    # dump just before a process group times out
    dump_on_timeout: bool = _setting(True, _boolean, _SWITCH_WORDS)
    dump_signal: str | None = _setting(
        None,
        _signal,
        "the name of a signal that can be caught, such as SIGUSR2",
        metavar="SIGNAL",
        help="dump on this signal (default: no handler is installed)",
    )
    # prefix of one named pipe per rank: writing a byte to it dumps
    dump_pipe: str | None = _setting(None, _path, "a path prefix", internal=True)
    check_numbers: str | None = _setting(
        None,
        _words(
            dict.fromkeys(_OFF),
            lambda value: str(parse_number_checks(str(value).strip().lower())),
        ),
        "on, off, every N steps, nan, every-op, tolerance=X, or several of these with commas",
    )
    on_verdict: str | None = _setting(
        None,
        _command,
        "a command, or a function of an importable module as MODULE:FUNCTION",
        metavar="COMMAND",
        help="run this for each verdict, with the verdict as a line of JSON on its standard input",
    )
    metrics_file: str | None = _setting(
        None,
        _path,
        "a file or a folder",
        metavar="FILE",
        help="write Prometheus metrics to this file, or to one file per job in this folder",
    )
    # watch the node's hardware; a folder: the host's /proc, /sys and /var are mounted in it
    health: str = _setting(
        "on",
        _words({**dict.fromkeys(_ON, "on"), **dict.fromkeys(_OFF, "off")}, _absolute_path),
        "on, off, or a folder",
    )
    # on which switch and in which rack the hosts are: an inventory in YAML or JSON, or Slurm's
    # topology
    topology: str | None = _setting(None, _absolute_path, "a file")
    # native: built by `commlens build-native`; auto: native if it was built
    engine: str = _setting("auto", _engine, "auto, python or native")
    # NCCL itself tells commlens of its calls; how much
    nccl_profiler: str = _setting(
        "off",
        _words({**dict.fromkeys(_OFF, "off"), **{level: level for level in NCCL_LEVELS}}),
        "off, calls, kernels or transfers",
        metavar="LEVEL",
        help=(
            "let NCCL itself tell of its host calls (calls), also when kernels start and end"
            " (kernels), also how far transfers between nodes are (transfers; default off)"
        ),
    )
    # `commlens launch` builds the native engine in the background where none was built
    auto_build: bool = _setting(True, _boolean, _SWITCH_WORDS)
    timing: bool = _setting(False, _boolean, _SWITCH_WORDS, help="record durations on the device")
    cpp_stack: bool = _setting(False, _boolean, _SWITCH_WORDS, help="record C++ frames too")
    # `commlens launch` traces every worker
    trace: str | None = _setting(
        None,
        _words({**dict.fromkeys(_OFF), **dict.fromkeys((*_ON, ALL), ALL)}, _steps),
        "all, or optimizer steps as FIRST:LAST, such as 2:4",
    )
    trace_dir: str = _setting("commlens-trace", _path, "a folder")
    job: str | None = _setting(
        None,
        _job,
        "up to 200 letters, digits, dots, dashes and underscores, the first not a dot or a dash",
        internal=True,
    )
    # the name of this program where it shares a group with other programs; None: by its script
    world: str | None = _setting(
        None,
        _job,
        "up to 200 letters, digits, dots, dashes and underscores, the first not a dot or a dash",
        metavar="NAME",
        help="call this program so where it shares a group with others: trainer, rollout",
    )
    # where worlds on several nodes meet that share a group; auto: in the group's own store
    meet: str = _setting(
        AUTO,
        _words({AUTO: AUTO, **dict.fromkeys(_OFF, "off")}, _absolute_path),
        f"{AUTO}, off, or a folder that the nodes share",
    )
    # the launcher already watches the job
    watched: bool = _setting(False, _boolean, _SWITCH_WORDS, internal=True)

    @property
    def stall_ceiling_s(self) -> float:
        """The seconds after which any stall is reported: the stall timeout, unless it is learned
        from the job.
        """
        return STALL_CEILING_S if self.stall_timeout == AUTO else float(self.stall_timeout)

    def aborts_on(self, fault: str) -> bool:
        """Return whether the job is ended after a fault of this kind, one of ``FAULTS``."""
        return fault in self.abort_on.split(",")


ACCEPTED: Final[dict[str, Accepts]] = {
    each.name: each.metadata["accepts"] for each in fields(Settings)
}
NAMES: Final = tuple(ACCEPTED)
_NONE_IS_OFF: Final = frozenset({"check_numbers", "trace"})


@dataclass(frozen=True)
class Resolved:
    """The effective settings."""

    settings: Settings
    # for each setting: "default", a file path, a variable name, "command line"
    origins: dict[str, str]
    warnings: list[str]  # sentences about ignored values


def load_settings(
    *,
    environ: Mapping[str, str] | None = None,
    config_file: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    overrides_from: str = COMMAND_LINE,
    strict: bool = True,
) -> Resolved:
    """Return the effective settings.

    Args:
        environ: the environment; by default the process's.
        config_file: a YAML file; by default ``$COMMLENS_CONFIG_FILE``, else
            ``commlens/config.yaml`` in ``$XDG_CONFIG_HOME`` (``~/.config``) if it exists.
        overrides: values from the command line or from arguments in code; None if not given.
        overrides_from: the origin of the overrides.
        strict: whether an unknown key, an invalid value or an unreadable file is an error, as in
            commands. Otherwise each is a warning and the value of the next lower priority is used,
            as in a worker that its environment enabled.

    Raises:
        ConfigError: with ``strict``. The message names the key, where it was set, and the accepted
            values.
        MissingDependency: with ``strict``, if there is a file and PyYAML is not installed.
    """
    environ = os.environ if environ is None else environ
    layers = _Layers(strict)
    _apply_file(layers, environ, config_file)
    _apply_torch_variables(layers, environ)
    if environ.get(ACCELERATE_VARIABLE, "").strip().lower() in _ACCELERATE_ON:
        layers.apply("debug", True, ACCELERATE_VARIABLE)  # off concerns only Accelerate
    for variable in sorted(environ):
        if (
            variable.startswith(PREFIX)
            and variable not in NOT_SETTINGS
            and environ[variable].strip()
        ):
            name = "debug" if variable == DEBUG_VARIABLE else variable.removeprefix(PREFIX).lower()
            layers.apply(name, environ[variable], variable, written=variable)
    for name, value in (overrides or {}).items():
        if value is not None:
            layers.apply(name, value, overrides_from)
    origins = {name: layers.origins.get(name, DEFAULT) for name in NAMES}
    return Resolved(replace(Settings(), **layers.values), origins, layers.warnings)


def settings_environment(settings: Settings) -> dict[str, str]:
    """Return the ``COMMLENS_*`` variables that pass a launcher's settings to its workers.

    They include defaults, so that the launcher's values override a worker's file and torch's
    variables. Folders become absolute, because a script may change its working directory.
    """
    variables = {}
    for name in NAMES:
        value = getattr(settings, name)
        if name in _NONE_IS_OFF:
            value = value or "off"
        if value is None:
            continue
        if ACCEPTED[name].parse is _path:
            value = absolute(value)
        variables[variable_of(name)] = str(int(value) if isinstance(value, bool) else value)
    return variables


def absolute(path: str) -> str:
    """Return an absolute path, with its last slash; below the folder for temporary files if the
    working directory is gone.
    """
    try:
        whole = os.path.abspath(path)  # noqa: PTH100 - does not follow links
    except FileNotFoundError:
        whole = os.path.join(tempfile.gettempdir(), path)  # noqa: PTH118
    return whole + ("/" if path.endswith("/") and not whole.endswith("/") else "")


def accepted(name: str, value: Any, origin: str) -> Any:
    """Return a setting's value as :class:`Settings` holds it.

    Raises:
        ConfigError: it is not accepted. The message names ``origin``, and the accepted values.
    """
    layers = _Layers(strict=True)
    layers.apply(name, value, origin)
    return layers.values[name]


def variable_of(name: str) -> str:
    """Return the environment variable of a setting: ``"box_dir" -> "COMMLENS_BOX_DIR"``."""
    return DEBUG_VARIABLE if name == "debug" else PREFIX + name.upper()


def is_switched_on(environ: Mapping[str, str]) -> bool:
    """Return whether ``COMMLENS`` enables recording. ``commlens_autoload`` has the same rule."""
    return environ.get(SWITCH, "").strip().lower() not in ("", "0", "false", "no", "off")


class _Layers:
    """Values by setting; each layer overrides the lower ones."""

    def __init__(self, strict: bool) -> None:
        self.strict = strict
        self.values: dict[str, Any] = {}
        self.origins: dict[str, str] = {}
        self.warnings: list[str] = []

    def apply(self, name: str, value: Any, origin: str, *, written: str | None = None) -> None:
        """Set one value; ``written`` is the variable that the user set, if any."""
        accepts = ACCEPTED.get(name)
        if accepts is None:
            self.refuse(_unknown(name, origin, written))
            return
        try:
            self.values[name] = accepts.parse(value)
        except (ValueError, TypeError, OverflowError):
            place = written if written else f"{name} ({origin})"
            self.refuse(
                f"{place} is {_shown(value)}, which is not accepted: it takes {accepts.words}.",
                or_else=f"{name} is unchanged.",
            )
            return
        self.origins[name] = origin

    def refuse(self, message: str, *, or_else: str = "It is ignored.") -> None:
        if self.strict:
            raise ConfigError(message)
        self.warnings.append(f"{message} {or_else}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _unknown(name: str, origin: str, written: str | None) -> str:
    known = [
        variable_of(each) if written else each for each in NAMES if not ACCEPTED[each].internal
    ]
    subject = f"The variable {written} is" if written else f"{name!r} ({origin}) is"
    return f"{subject} not a commlens setting." + (
        did_you_mean(written or name, known) or f" The settings are {', '.join(known)}."
    )


# --- the file


def _read_file(path: Path) -> str:
    """Read a file, but not one whose reading may block for ever."""
    if path.is_fifo() or (path.is_char_device() and path != Path(os.devnull)):
        raise OSError(0, "it is not a regular file")
    return path.read_text(encoding="utf-8")


def _apply_file(
    layers: _Layers, environ: Mapping[str, str], config_file: str | Path | None
) -> None:
    path, named_by = config_path(environ, config_file)
    if path is None:
        return
    try:
        text = _read_file(path)
    except (OSError, ValueError) as error:
        if named_by is None and isinstance(error, (FileNotFoundError, NotADirectoryError)):
            return
        origin = f" ({named_by})" if named_by else ""
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        layers.refuse(f"The settings file {path}{origin} cannot be read: {reason}.")
        return
    try:
        content = _parse_yaml(text, path)
    except (ConfigError, MissingDependency) as error:
        if layers.strict:
            raise
        layers.warnings.append(f"{error} The file is ignored.")
        return
    for key, value in content.items():
        if isinstance(key, str) and key in ACCEPTED and value is None:
            continue  # "key:" without a value keeps the default
        layers.apply(str(key), value, str(path))


def config_path(
    environ: Mapping[str, str], config_file: str | Path | None
) -> tuple[Path | None, str | None]:
    """Return the settings file and the option or variable that names it; None for a default path,
    which need not exist.
    """
    if config_file is not None:
        return Path(config_file).expanduser(), "--config-file"
    if environ.get(CONFIG_FILE_VARIABLE):
        return Path(environ[CONFIG_FILE_VARIABLE]).expanduser(), CONFIG_FILE_VARIABLE
    if environ.get("XDG_CONFIG_HOME"):
        return Path(environ["XDG_CONFIG_HOME"]) / "commlens" / "config.yaml", None
    if environ.get("HOME"):
        return Path(environ["HOME"]) / ".config" / "commlens" / "config.yaml", None
    return None, None


def _parse_yaml(text: str, path: Path) -> dict[Any, Any]:
    try:
        import yaml
    except ImportError:
        raise MissingDependency(
            f"The settings file {path} needs PyYAML to be read: pip install PyYAML"
        ) from None
    try:
        content = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or type(error).__name__
        raise ConfigError(f"The settings file {path}{where} is not YAML: {problem}.") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(
            f"The settings file {path} must hold lines like 'stall_timeout: 60', but holds a"
            f" {type(content).__name__}."
        )
    return content


# --- torch's variables configure torch's recorder; values that make sense for commlens apply to it,
# too. Each pair is (old name, new name); the new name wins, and any COMMLENS_* variable wins over
# both. Torch reports invalid values; here they are warnings.


def _apply_torch_variables(layers: _Layers, environ: Mapping[str, str]) -> None:
    def given(*variables: str) -> list[tuple[str, str]]:
        return [
            (variable, environ[variable].strip())
            for variable in variables
            if environ.get(variable, "").strip()
        ]

    for variable, text in given(*RECORDER_VARIABLES):
        if RECORDER_MARK in environ and text == str(RECORDER_ENTRIES):
            continue
        if not re.fullmatch(r"\d{1,18}", text):
            layers.warnings.append(
                f"{variable} is {_shown(text)}, which is not a number of entries. It is ignored."
            )
        elif int(text) == 0:
            layers.warnings += _left_on(variable, "box_entries", environ)
        else:
            if int(text) > CAPACITY_MAX:
                layers.warnings.append(
                    f"{variable} is {text}, but commlens keeps at most {CAPACITY_MAX} entries. That"
                    " maximum is used."
                )
            layers.apply("box_entries", min(int(text), CAPACITY_MAX), variable)
    for name, off_applies, variables in (
        ("dump_on_timeout", False, ("TORCH_NCCL_DUMP_ON_TIMEOUT",)),
        ("cpp_stack", True, ("TORCH_NCCL_TRACE_CPP_STACK", "TORCH_FR_CPP_STACK")),
        ("timing", True, ("TORCH_NCCL_ENABLE_TIMING",)),
    ):
        for variable, text in given(*variables):
            try:
                value = _boolean(text)
            except ValueError:
                layers.warnings.append(
                    f"{variable} is {_shown(text)}, which is neither on nor off. It is ignored."
                )
                continue
            if value or off_applies:
                layers.apply(name, value, variable)
            else:
                layers.warnings += _left_on(variable, name, environ)
    for variable, text in given("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_FR_DUMP_TEMP_FILE"):
        # torch appends the rank to this path, so a folder beside it never collides with torch's
        # file
        layers.apply("dump_dir", os.path.join(os.path.dirname(text), "commlens"), variable)  # noqa: PTH118, PTH120
    for variable, text in given("TORCH_NCCL_DEBUG_INFO_PIPE_FILE"):
        # torch's pipe is <value><rank>.pipe, commlens's <value><rank>.commlens.pipe
        layers.apply("dump_pipe", text, variable)


def _left_on(variable: str, name: str, environ: Mapping[str, str]) -> list[str]:
    """Return a warning that a 0 in torch's variable does not affect commlens, unless its own
    variable is set, too.
    """
    if variable_of(name) in environ:
        return []
    return [
        f"{variable}=0 disables torch's recorder but not commlens's; to disable commlens's, set"
        f" {variable_of(name)}=0."
    ]
