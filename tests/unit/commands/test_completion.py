"""What the shells complete, and the manual page."""

from __future__ import annotations

import builtins
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from typing import Any

import pytest

from commlens.commands import COMMANDS, main
from conftest import REPOSITORY, SOURCE

pytest.importorskip("shtab")
pytest.importorskip("torch")  # the options of launch are torchrun's, too


@pytest.fixture(scope="module")
def scripts() -> dict[str, str]:
    import shtab

    from commlens.commands.completion import whole_parser

    return {shell: shtab.complete(whole_parser(), shell=shell) for shell in ("bash", "zsh", "fish")}


def test_it_prints_the_script(capsys, scripts):
    assert main(["completion", "bash"]) == 0
    assert capsys.readouterr().out.rstrip() == scripts["bash"].rstrip()


@pytest.mark.launches
@pytest.mark.parametrize(
    ("words", "some"),
    [
        ([""], {entry.name for entry in COMMANDS}),
        (["dia"], {"diagnose"}),
        (["diagnose", "--en"], {"--entries"}),
        (["demo", "mismatch-"], {"mismatch-op", "mismatch-dtype"}),
        (["launch", "--stall"], {"--stall-timeout"}),
        (["launch", "--nproc"], {"--nproc-per-node"}),
        (["convert", "--to", "fr"], {"fr-pickle", "fr-json"}),
        (["completion", ""], {"bash", "zsh", "fish"}),
        (["diagnose", "du"], {"dumps"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bash_completes(words, some, scripts, tmp_path):
    (tmp_path / "dumps").mkdir()
    (tmp_path / "script").write_text(scripts["bash"])
    line = (
        f"COMP_WORDS=(commlens {' '.join(word or repr('') for word in words)});"
        f" COMP_CWORD={len(words)}"
    )
    program = (
        f'source ./script; {line}; $(complete -p commlens | grep -o "_shtab[a-z_]*"); printf'
        ' "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=20
    )
    assert some <= set(done.stdout.split()), done


@pytest.mark.launches
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shell_can_read_its_script(shell, scripts, tmp_path):
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    (tmp_path / "script").write_text(scripts[shell])
    done = subprocess.run(
        [shell, "-n", "script"], cwd=tmp_path, capture_output=True, text=True, timeout=20
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_without_shtab_it_says_what_to_install(monkeypatch, capsys):
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name == "shtab":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    assert main(["completion", "fish"]) == 2
    assert "pip install shtab" in capsys.readouterr().err


@pytest.mark.launches
def test_the_manual_page_has_every_command_and_option(tmp_path):
    pytest.importorskip("argparse_manpage")
    page = tmp_path / "commlens.1"
    source = [
        "--module",
        "commlens.commands.completion",
        "--function",
        "whole_parser",
        "--format",
        "single-commands-section",
    ]
    command = [
        sys.executable,
        "-c",
        "from argparse_manpage.cli import main; main()",
        *source,
        "--prog",
        "commlens",
        "--output",
        str(page),
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )
    assert done.returncode == 0, done.stderr
    text = page.read_text().replace("\\-", "-")
    assert [entry.name for entry in COMMANDS if f"commlens {entry.name}" not in text] == []
    assert {"--stall-timeout", "--rdzv-endpoint", "--entries"} <= set(
        re.findall(r"--[a-z-]+", text)
    )
    if shutil.which("groff"):
        read = subprocess.run(
            ["groff", "-man", "-Tascii", "-ww", str(page)],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (read.returncode, read.stderr) == (0, "")
    pinned = re.search(r"^torch==(\S+)", (REPOSITORY / "constraints.txt").read_text(), re.MULTILINE)
    # commlens launch has torchrun's options
    if pinned is not None and version("torch").split("+")[0] == pinned[1]:
        installed = (SOURCE / "commlens.1").read_text().replace("\\-", "-")
        assert set(re.findall(r"--[a-z-]+", installed)) == set(re.findall(r"--[a-z-]+", text)), (
            "make man writes it anew"
        )
        assert [entry.name for entry in COMMANDS if f"commlens {entry.name}" not in installed] == []
