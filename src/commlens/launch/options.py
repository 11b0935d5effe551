"""The options that `launch` and `run` share: settings given on the command line, before the program."""

from __future__ import annotations

import argparse
from typing import Any, Final

from commlens.config import ACCEPTED, Resolved, load_settings

OPTIONS: Final = {
    "stall_timeout": ("SECONDS", "how long a collective may be waited for before the verdict is printed (default 60)"),
    "on_stall": ("{warn,abort}", "what to do then besides printing it (default warn: the job goes on)"),
    "debug": (None, "verify every collective against the other ranks' before it is issued, and refuse a bad one on all of them"),
    "verify_timeout": ("SECONDS", "how long a rank may be silent then (default: the process group's timeout)"),
    "on_mismatch": ("{warn,abort}", "what to do when ranks are seen to disagree, besides saying so (default warn: the job goes on)"),
    "dump_dir": ("DIR", "where dumps go, one folder per job (default commlens-dumps)"),
    "keep_dumps": ("N", "how many jobs' dumps to keep there (default 10)"),
    "box_entries": ("N", "collectives remembered per rank (default 2000; 0 records nothing)"),
    "box_dir": ("DIR", "where black boxes live (default: shared memory)"),
    "dump_signal": ("SIGNAL", "let this signal dump (default: no handler is installed)"),
    "timing": (None, "record durations on the device"),
    "cpp_stack": (None, "record C++ frames too"),
}
"""Setting to (metavar, help); no metavar: a switch, which ``--no-...`` switches off."""


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add the settings that make sense on a command line, and ``--config-file``, as a group of their own."""
    group = parser.add_argument_group("commlens", "settings; each can also be a COMMLENS_* variable or stand in the settings file")
    for name, (metavar, help_text) in OPTIONS.items():
        flag = "--" + name.replace("_", "-")
        if metavar is None:
            group.add_argument(flag, dest=f"commlens_{name}", action=argparse.BooleanOptionalAction, default=None, help=help_text)
        else:
            group.add_argument(flag, dest=f"commlens_{name}", metavar=metavar, help=f"{help_text}; {ACCEPTED[name].words}")
    group.add_argument("--config-file", dest="commlens_config_file", metavar="FILE", help="the settings file (YAML)")


def settings_from(arguments: argparse.Namespace, **more: Any) -> Resolved:
    """The settings in force, the command line's on top.

    Args:
        arguments: with what :func:`add_settings` added.
        more: settings of one command only; None where not given.

    Raises:
        ConfigError: an unknown key or a bad value, wherever it was set.
    """
    overrides: dict[str, Any] = {name: getattr(arguments, f"commlens_{name}") for name in OPTIONS}
    overrides.update(more)
    return load_settings(config_file=arguments.commlens_config_file, overrides=overrides)
