"""The native code's own test: what it does to shared memory, without torch. ``make native-check``
runs it.

Threads under ThreadSanitizer and AddressSanitizer, writers killed at every instruction, and the
same for another processor. A part that cannot be done here says why and is left out; one that fails
makes the exit status 1.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import killed_board
import killed_box
import stepped
from stepped import LeftOutError

MILLISECONDS = "8000"
MEETINGS = "3000"
SANITIZERS = {
    # gcc says that it does not know fences here. None is needed to see that there is no race: all
    # that is shared is stored atomically.
    "thread": ("-fsanitize=thread", "-Wno-tsan"),
    "address": ("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
}
ARM, QEMU = "aarch64-linux-gnu-g++", ("qemu-aarch64-static", "qemu-aarch64")


def crowd(driver: Path, *before: str | Path) -> str:
    """Threads that write and read, and ranks that verify what they issue, as threads and as
    processes.
    """
    said = stepped.run([*before, driver, "crowd", MILLISECONDS]) + stepped.run(
        [*before, driver, "meet", MEETINGS]
    )
    written = sum(
        int(line.split()[0]) for line in said.splitlines() if " records by 4 threads" in line
    )
    accepted = sum(
        int(line.split()[7])
        for line in said.splitlines()
        if line.startswith("a reader in a thread")
    )
    assert written and accepted
    return (
        f"4 threads wrote {written} records, a reader accepted {accepted}, all whole; 4 ranks"
        f" verified 2 x {MEETINGS} collectives"
    )


def sanitized(driver: Path) -> str:
    """The same; where addresses are too random for the sanitizer's runtime, with less of that."""
    try:
        return crowd(driver)
    except AssertionError as error:
        if "unexpected memory mapping" not in str(error):
            raise
    if not shutil.which("setarch"):
        raise LeftOutError(
            "this kernel's addresses are too random for the compiler's runtime, and there is no"
            " setarch"
        )
    return crowd(driver, "setarch", "-R")


def elsewhere(driver: Path, here: Path, folder: Path) -> str:
    """For another processor, by an emulator of it: it writes what this one writes."""
    emulator = next(name for name in QEMU if shutil.which(name))
    said = crowd(driver, emulator)
    script = folder / "elsewhere.script"
    script.write_text("".join(line + "\n" for line in killed_box.script(36).lines))
    images = []
    for command in ([here], [emulator, driver]):
        file = folder / "elsewhere.box"
        file.write_bytes(killed_box.empty_box())
        stepped.run([*command, "play", "box", file, script])
        images.append(file.read_bytes())
    assert images[0] == images[1], "the two processors write different boxes"
    return f"{said}; the same box as on this processor, byte for byte"


def arm(folder: Path) -> Path:
    """The driver for aarch64."""
    missing = [name for name in (ARM, QEMU[0]) if not shutil.which(name)]
    if missing and not (missing == [QEMU[0]] and shutil.which(QEMU[1])):
        raise LeftOutError(
            f"there is no {' and no '.join(missing)} (on Debian: apt install g++-aarch64-linux-gnu"
            " qemu-user-static)"
        )
    return stepped.build(folder, "aarch64", "-static", compiler=[ARM])


def main() -> int:
    """Do all of it."""
    os.environ |= {"TSAN_OPTIONS": "halt_on_error=1", "ASAN_OPTIONS": "abort_on_error=0"}
    failed: list[str] = []
    left_out: list[str] = []

    def part(name: str, action: Callable[[], str]) -> None:
        began = time.monotonic()
        try:
            said = action()
        except LeftOutError as error:
            left_out.append(name)
            said = f"left out: {error}"
        except (AssertionError, OSError, subprocess.SubprocessError) as error:
            failed.append(name)
            said = f"FAILED: {error}"
        print(f"{name:26} {time.monotonic() - began:4.0f} s  {said}", flush=True)

    with (
        tempfile.TemporaryDirectory(prefix="commlens-native-check-") as temporary,
        ThreadPoolExecutor(2) as pool,
    ):
        folder = Path(temporary)
        plain: Future[Path] = pool.submit(stepped.build, folder, "plain")
        drivers = {
            name: pool.submit(stepped.build, folder, name, *flags)
            for name, flags in SANITIZERS.items()
        }
        other = pool.submit(arm, folder)
        part("killed in a box", lambda: killed_box.step_through(plain.result(), folder))
        part("killed in a board", lambda: killed_board.step_through(plain.result(), folder))
        part("killed at random", lambda: killed_box.kill_at_random(plain.result(), folder, 40))
        part("threads", lambda: crowd(plain.result()))
        part("under ThreadSanitizer", lambda: sanitized(drivers["thread"].result()))
        part("under AddressSanitizer", lambda: sanitized(drivers["address"].result()))
        part("for aarch64, emulated", lambda: elsewhere(other.result(), plain.result(), folder))
    ended = f"failed: {', '.join(failed)}" if failed else "passed"
    without = f", without what was left out: {', '.join(left_out)}" if left_out else ""
    print(f"The native code's own test {ended}{without}.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
