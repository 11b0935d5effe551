"""Look at a job on several machines, through the user's own ssh, and merge what the machines
saw.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import msgspec

from commlens.errors import CommandError, MissingDependency
from commlens.outside.sample import HostSamples
from commlens.text import clean, exit_phrase, sentence

_AT_ONCE: Final = 32
_CONNECT_S: Final = 10
_SLACK_S: Final = 60.0  # for the login, the start of Python and reading the stacks
_SSH: Final = ("ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={_CONNECT_S}")


def named_hosts(hosts: str | None, hostfile: str | None) -> list[str]:
    """Return the hosts of ``--hosts a,b,c`` and of a file with one host per line (Open MPI's and
    DeepSpeed's ``slots=`` are ignored).

    Raises:
        CommandError: the file cannot be read, or a name is no host's name.
    """
    names = [name.strip() for name in (hosts or "").split(",")]
    if hostfile:
        try:
            lines = Path(hostfile).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise CommandError(
                f"The file of hosts {hostfile} cannot be read:"
                f" {getattr(error, 'strerror', None) or error}."
            ) from None
        names += [
            line.partition("#")[0].split()[0].partition(":")[0]
            for line in lines
            if line.partition("#")[0].strip()
        ]
    names = list(dict.fromkeys(name for name in names if name))
    for name in names:
        if name.startswith("-") or not name.isprintable() or " " in name:
            raise CommandError(f"{clean(name)!r} is not the name of a host.")
    return names


def look_on_hosts(
    hosts: Sequence[str], asked: Sequence[str], *, window_s: float, command: str | None = None
) -> list[HostSamples]:
    """Run ``commlens attach --samples`` on each host, on all at once.

    Args:
        hosts: names for ssh.
        asked: the arguments that say which job.
        window_s: seconds for which each host looks.
        command: commlens on the hosts; this Python's by default, which is right on a shared file
            system.

    Returns:
        What each host saw, with a note instead where it could not look.
    """
    remote = command or f"{shlex.quote(sys.executable)} -m commlens"
    line = " ".join(
        [remote, "attach", "--samples", f"--window {window_s:g}", *map(shlex.quote, asked)]
    )
    with ThreadPoolExecutor(min(_AT_ONCE, max(1, len(hosts)))) as pool:
        found = pool.map(lambda host: _look_on(host, line, window_s + _SLACK_S), hosts)
        return [world for worlds in found for world in worlds]


def _look_on(host: str, line: str, timeout_s: float) -> list[HostSamples]:
    try:
        done = subprocess.run(
            [*_SSH, host, line],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )
    except FileNotFoundError:
        raise MissingDependency("--hosts needs ssh, which is not installed.") from None
    except subprocess.TimeoutExpired:
        return [HostSamples(host, notes=[f"{host} did not answer within {timeout_s:.0f} s."])]
    if done.returncode:
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines() or [
            f"ssh {exit_phrase(done.returncode)}"
        ]
        note = sentence(f"{host} could not be asked: {clean(lines[-1][:300])}")
        return [HostSamples(host, notes=[note])]
    try:
        # A login shell may print something before.
        samples = done.stdout[done.stdout.index(b'[{"host"') :]
        return msgspec.json.decode(samples, type=list[HostSamples])
    except (ValueError, msgspec.DecodeError) as error:
        note = f"{host} answered with something that is not its samples: {clean(str(error)[:200])}"
        return [HostSamples(host, notes=[note])]
