"""Plays NCCL before commlens's plugin, by ``tests/native/nccl_player.c``: its communicators, calls,
kernels and transfers, in sequences that tests write.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[3]
PLUGIN = REPOSITORY / "src" / "commlens" / "native" / "_nccl_profiler.c"
PLAYER = REPOSITORY / "tests" / "native" / "nccl_player.c"
FLAGS = ("-O2", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared")
KERNEL_STOP = 22  # NCCL's numbers of states
GPU_WAIT, SEND_WAIT, RECEIVE_WAIT, PEER_WAIT = 8, 9, 10, 20

FUNCTIONS: Mapping[str, tuple[Any, str]] = {
    "load": (ctypes.c_int, "sii"),
    "unload": (None, ""),
    "mask": (ctypes.c_int, ""),
    "init": (ctypes.c_uint64, "Usiii"),
    "finalize": (None, "U"),
    "stop": (None, "U"),
    "record": (None, "UiU"),
    "group": (ctypes.c_uint64, "Ui"),
    "coll_api": (ctypes.c_uint64, "UsUsii"),
    "p2p_api": (ctypes.c_uint64, "UsUsi"),
    "coll": (ctypes.c_uint64, "UUUsUsii"),
    "p2p": (ctypes.c_uint64, "UUsUsii"),
    "ce_coll": (ctypes.c_uint64, "UUUsUs"),
    "kernel": (ctypes.c_uint64, "UUiU"),
    "proxy_op": (ctypes.c_uint64, "UUiiiii"),
    "proxy_step": (ctypes.c_uint64, "UUi"),
    "measure": (ctypes.c_uint64, "UpUU"),
    "crowd": (ctypes.c_uint64, "piii"),
}
_TYPES = {"s": ctypes.c_char_p, "i": ctypes.c_int, "U": ctypes.c_uint64, "p": ctypes.c_void_p}


def compiler() -> str | None:
    """The C compiler; None: there is none."""
    return shutil.which("cc") or shutil.which("gcc")


def build(folder: Path, source: Path, *more: str) -> Path:
    """Compile one of the two sources into a folder, and return the library."""
    library = folder / f"{source.stem}.so"
    command = [
        compiler() or "cc",
        *FLAGS,
        *more,
        str(source),
        "-o",
        str(library),
        "-lpthread",
        "-ldl",
    ]
    subprocess.run(command, check=True, timeout=120)
    return library


def build_plugin(folder: Path) -> Path:
    """Compile the plugin, as the package does."""
    return build(folder, PLUGIN, "-fvisibility=hidden", "-Wl,-z,nodelete")


class Player:
    """NCCL of one process, with a plugin.

    Args:
        plugin: its library.
        player: that of the player.
        version: of the interface.
        nccl: NCCL's version.
    """

    def __init__(self, plugin: Path, player: Path, version: int = 6, nccl: int = 23007) -> None:
        self.version = version
        library = ctypes.CDLL(str(player))
        for name, (result, arguments) in FUNCTIONS.items():
            function = getattr(library, f"player_{name}")
            function.restype, function.argtypes = result, [_TYPES[each] for each in arguments]
            setattr(self, name, function)
        self.strings: dict[str, bytes] = {}
        assert self.load(os.fsencode(plugin), version, nccl)

    load: Any
    unload: Any
    mask: Any
    init: Any
    finalize: Any
    stop: Any
    record: Any
    group: Any
    coll_api: Any
    p2p_api: Any
    coll: Any
    p2p: Any
    ce_coll: Any
    kernel: Any
    proxy_op: Any
    proxy_step: Any
    measure: Any
    crowd: Any

    def communicator(
        self, hash: int, name: str | None, size: int, rank: int, nodes: int = 1
    ) -> Communicator:
        """A new communicator of this process."""
        context = self.init(hash, name.encode() if name else None, nodes, size, rank)
        return Communicator(self, context)


class Communicator:
    """One communicator; NCCL's order of calls."""

    def __init__(self, player: Player, context: int) -> None:
        self.player, self.context = player, context
        self.numbers: dict[str, int] = {}

    def call(self, func: str = "AllReduce", count: int = 1024, *, captured: bool = False) -> int:
        """The host's call of a collective, which returns; its handle."""
        play = self.player
        self.player.stop(self.player.group(self.context, 1))
        handle = play.coll_api(self.context, func.encode(), count, b"ncclFloat32", 0, captured)
        play.stop(handle)
        return int(handle)

    def launch(
        self, parent: int, func: str = "AllReduce", count: int = 1024, channels: int = 2
    ) -> int:
        """Its launch; the task's handle."""
        play = self.player
        number = self.numbers.get(func, 0)
        self.numbers[func] = number + 1
        group = play.group(self.context, 0)
        assert group, "NCCL 2.27 tells nothing of a group without a handle"
        # version 4 has the group as the parent
        handle = play.coll(
            self.context,
            group if play.version == 4 else parent,
            number,
            func.encode(),
            count,
            b"ncclFloat32",
            0,
            channels,
        )
        play.stop(handle)
        play.stop(group)
        return int(handle)

    def start(self, task: int, channels: int = 2) -> list[int]:
        """The kernel starts on these channels."""
        return [self.player.kernel(self.context, task, at, 5000 + at) for at in range(channels)]

    def end(self, kernels: list[int]) -> None:
        """The kernel ends on these channels."""
        for at, handle in enumerate(kernels):
            self.player.record(handle, KERNEL_STOP, 9000 + at)
            self.player.stop(handle)

    def run(self, times: int = 1, func: str = "AllReduce", **more: Any) -> None:
        """Whole collectives."""
        for _ in range(times):
            self.end(self.start(self.launch(self.call(func, **more), func)))

    def transfer(
        self,
        task: int,
        peer: int,
        *,
        channel: int = 0,
        is_send: bool,
        steps: int = 64,
        done: int,
        state: int = SEND_WAIT,
    ) -> int:
        """A transfer that has done so many steps, and whose next one is in a state."""
        play = self.player
        handle = play.proxy_op(self.context, task, 0, channel, peer, steps, int(is_send))
        for step in range(done):
            each = play.proxy_step(self.context, handle, step)
            play.record(each, state, 4096)
            play.stop(each)
        if done < steps:
            play.record(play.proxy_step(self.context, handle, done), state, 0)
        return int(handle)
