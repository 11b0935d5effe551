"""``commlens completion``, and the parser of all commands behind it and the manual page."""

from __future__ import annotations

import argparse
from typing import Final

from commlens.commands import COMMANDS, SUMMARY, Paragraphs, documentation
from commlens.errors import MissingDependency

_FOLDERS: Final = {"dump_dir", "box_dir", "trace_dir"}


def whole_parser() -> argparse.ArgumentParser:
    """Return a parser with a subparser for each command. It is not used to parse: each command
    reads its own arguments.

    The options of ``launch`` include torchrun's if torch is installed.
    """
    whole = argparse.ArgumentParser(prog="commlens", description=SUMMARY, allow_abbrev=False)
    whole.add_argument("-V", "--version", action="store_true", help="show the version")
    commands = whole.add_subparsers(metavar="COMMAND", dest="command")
    for entry in COMMANDS:
        command = entry.load()
        if entry.name == "launch":
            parser = _launch_parser(commands, entry.help)
        else:
            parser = commands.add_parser(
                entry.name,
                help=entry.help,
                description=documentation(command),
                formatter_class=Paragraphs,
                allow_abbrev=False,
            )
            command.add_arguments(parser)
        for action in parser._actions:
            _complete(entry.name, action)
    return whole


def _launch_parser(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], summary: str
) -> argparse.ArgumentParser:
    from commlens.launch.options import add_settings
    from commlens.launch.torchrun import torchrun_parser

    try:
        torchruns = [torchrun_parser()]
    except MissingDependency:
        torchruns = []
    parser = commands.add_parser(
        "launch",
        help=summary,
        description=summary,
        parents=torchruns,
        conflict_handler="resolve",
        allow_abbrev=False,
    )
    for action in parser._actions:
        if action.help:
            # groff takes a line of the manual page that begins with ' for a macro.
            action.help = action.help.replace("'", '"')
    if not torchruns:
        add_settings(parser)
    return parser


def _complete(command: str, action: argparse.Action) -> None:
    """Say what an argument without fixed choices stands for, in the attribute that shtab reads."""
    import shtab

    if command == "demo" and action.dest == "scenario":
        from commlens.scenarios import SCENARIOS

        action.choices, action.metavar = [scenario.name for scenario in SCENARIOS], "SCENARIO"
    if action.choices or action.nargs == 0:
        return
    metavar = action.metavar if isinstance(action.metavar, str) else ""
    if metavar == "DIR" or action.dest.removeprefix("commlens_") in _FOLDERS:
        action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    elif metavar in ("FILE", "PATH", "OUT") or not action.option_strings:
        action.complete = shtab.FILE  # type: ignore[attr-defined]


class CompletionCommand:
    """Print a script that makes a shell complete commlens's commands and options.

    bash: mkdir -p ~/.local/share/bash-completion/completions; commlens completion bash >
    ~/.local/share/bash-completion/completions/commlens

    zsh: mkdir -p ~/.zfunc; commlens completion zsh > ~/.zfunc/_commlens, with fpath+=~/.zfunc
    before compinit in ~/.zshrc

    fish: mkdir -p ~/.config/fish/completions; commlens completion fish >
    ~/.config/fish/completions/commlens.fish

    The next shell that you open completes. Print the script again after an update of commlens or
    torch.
    """

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "shell", choices=("bash", "zsh", "fish"), help="the shell to print the script for"
        )

    def run(self, arguments: argparse.Namespace) -> int:
        try:
            import shtab
        except ImportError:
            raise MissingDependency(
                "commlens completion needs shtab, which is not installed: pip install shtab"
            ) from None

        print(shtab.complete(whole_parser(), shell=arguments.shell))
        return 0
