"""The public surface, pinned: a change to a name, a command, an option, a setting, an exit status
or a JSON key shows up here.

public_surface.json holds it. After a deliberate change, write it anew:

    PYTHONPATH=src python tests/unit/test_public_surface.py > tests/unit/public_surface.json
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import importlib
import importlib.util
import inspect
import json
import sys
from pathlib import Path
from typing import Any

import pytest

import commlens
from commlens import config, errors, testing
from commlens.commands import COMMANDS

PINNED = Path(__file__).with_name("public_surface.json")


def names() -> list[str]:
    return list(commlens.__all__)


def plain(value: Any) -> Any:
    """A default as JSON holds it."""
    if isinstance(value, enum.Enum):
        return value.value
    return value if value is None or isinstance(value, (bool, int, float, str)) else repr(value)


def parameters(function: Any) -> list[str]:
    """``["path", "*", "steps=None"]``; annotations are left out, because they name internal types."""
    found: list[str] = []
    star = False
    for parameter in inspect.signature(function).parameters.values():
        prefix = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(
            parameter.kind, ""
        )
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            found.append("*")
        star = star or parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        default = "" if parameter.default is parameter.empty else f"={plain(parameter.default)!r}"
        found.append(f"{prefix}{parameter.name}{default}")
    return found


def members(kind: type) -> list[str]:
    """Public attributes and methods, without those that Python's own or a library's base classes
    add.
    """
    ours = [base for base in kind.__mro__ if base.__module__.startswith("commlens")]
    found = {name for base in ours for name in (*vars(base), *getattr(base, "__annotations__", {}))}
    return sorted(name for name in found if not name.startswith("_"))


def api() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in names():
        value = getattr(commlens, name)
        if inspect.isclass(value):
            found[name] = {"members": members(value)}
            if not issubclass(value, Exception):
                found[name]["parameters"] = parameters(value)
        elif callable(value):
            found[name] = {"parameters": parameters(value)}
    return found | {
        f"testing.{name}": {"parameters": parameters(getattr(testing, name))}
        for name in testing.__all__
    }


def options(
    parser: argparse.ArgumentParser, hidden: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """Every option and positional argument with what it accepts; those in ``hidden`` are left out."""
    found: dict[str, Any] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found |= {
                f"{name} {key}": value
                for name, sub in action.choices.items()
                for key, value in options(sub).items()
            }
        elif not (
            {action.dest, *action.option_strings} & hidden or "--help" in action.option_strings
        ):
            # of positional arguments, Python versions disagree
            required = bool(action.option_strings) and action.required
            about = {
                "nargs": action.nargs,
                "required": required,
                "choices": action.choices and list(action.choices),
            }
            default = None if action.default == argparse.SUPPRESS else plain(action.default)
            key = ", ".join(action.option_strings) or f"{action.dest} (positional)"
            found[key] = {
                "default": default,
                **{name: value for name, value in about.items() if value not in (None, False)},
            }
    return found


def command_options(name: str) -> dict[str, Any]:
    if name == "launch":
        from torch.distributed.run import get_args_parser

        from commlens.launch.torchrun import torchrun_parser

        torchruns = get_args_parser()
        hidden = {
            name for action in torchruns._actions for name in (action.dest, *action.option_strings)
        }
        return options(torchrun_parser(), frozenset(hidden))
    parser = argparse.ArgumentParser()
    next(entry for entry in COMMANDS if entry.name == name).load().add_arguments(parser)
    return options(parser)


def settings() -> dict[str, Any]:
    fields = dataclasses.fields(config.Settings)
    return {
        field.name: {"default": plain(field.default), "variable": config.variable_of(field.name)}
        for field in fields
    }


def exit_codes() -> dict[str, int]:
    """The constants ``EXIT_...`` of the commands, and the exit status of every error that carries
    one.
    """
    found = {}
    for entry in COMMANDS:
        module = importlib.import_module(f"commlens.commands.{entry.module}")
        found |= {
            f"{entry.name} {name}": value
            for name, value in vars(module).items()
            if name.startswith("EXIT_")
        }
    for name in names():
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, errors.CommandError):
            found[name] = kind("message").exit_code
    return found


def slugs() -> dict[str, str]:
    return {
        name: kind.slug for name in names() if isinstance(kind := getattr(errors, name, None), type)
    }


def json_keys() -> dict[str, list[str]]:
    """The top-level keys of every published JSON schema, in order."""
    found = sorted(Path(commlens.__file__).parent.rglob("*.schema.json"))
    return {
        path.name.removesuffix(".schema.json"): list(json.loads(path.read_text())["properties"])
        for path in found
    }


def surface() -> dict[str, Any]:
    return {
        "names": names(),
        "api": api(),
        "commands": {entry.name: command_options(entry.name) for entry in COMMANDS},
        "settings": settings(),
        "exit_codes": exit_codes(),
        "error_slugs": slugs(),
        "json_keys": json_keys(),
    }


@pytest.fixture(scope="module")
def pinned() -> Any:
    return json.loads(PINNED.read_text())


def test_names(pinned):
    assert names() == pinned["names"]


def test_parameters_and_members(pinned):
    pytest.importorskip("torch")
    assert api() == pinned["api"]


def test_commands(pinned):
    assert [entry.name for entry in COMMANDS] == list(pinned["commands"])


@pytest.mark.parametrize("name", [entry.name for entry in COMMANDS])
def test_options(name, pinned):
    if name == "launch":
        pytest.importorskip("torch")
    assert command_options(name) == pinned["commands"][name]


def test_settings(pinned):
    assert settings() == pinned["settings"]


def test_exit_codes_and_slugs(pinned):
    assert (exit_codes(), slugs()) == (pinned["exit_codes"], pinned["error_slugs"])


def test_json_keys(pinned):
    assert json_keys() == pinned["json_keys"]


if __name__ == "__main__":
    json.dump(surface(), sys.stdout, indent=1)
    print()
