"""``commlens completion``."""

from __future__ import annotations

import argparse

from commlens.errors import MissingDependency


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
        from commlens.commands.whole_parser import whole_parser

        print(shtab.complete(whole_parser(), shell=arguments.shell))
        return 0
