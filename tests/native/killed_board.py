"""What a killed writer leaves on a rank's announcement board, read by the peers' reader in Python."""

from __future__ import annotations

import mmap
import random
from dataclasses import dataclass, field
from pathlib import Path

import stepped

from commlens.boards.board import ENTRIES, HEADER_SIZE, Board, PeerBoard

SLOT = HEADER_SIZE  # of the first channel
Said = tuple[int, int, int]  # signature, blob, extra


@dataclass
class Script:
    """A text for the driver, and what a peer must read after each of its lines."""

    lines: list[str] = field(default_factory=list)
    # by place: number, and what was said
    entries: list[dict[int, tuple[int, Said]]] = field(default_factory=lambda: [{}])
    last: list[int] = field(default_factory=lambda: [0])

    def announce(self, number: int, said: Said) -> None:
        self.lines.append(f"announce {number} {said[0]} {said[1]} {said[2]}")
        self.entries.append(self.entries[-1] | {number % ENTRIES: (number, said)})
        self.last.append(number)

    def withdraw(self, number: int) -> None:
        self.lines.append(f"withdraw {number}")
        held = self.entries[-1]
        mine = held.get(number % ENTRIES, (0,))[0] == number
        self.entries.append({place: entry for place, entry in held.items() if entry[0] != number})
        self.last.append(number - 1 if mine else self.last[-1])

    def read(self, line: int, number: int) -> Said | None:
        held, said = self.entries[line].get(number % ENTRIES, (0, (0, 0, 0)))
        return said if held == number else None


def script(seed: int = 6, times: int = 60) -> Script:
    """Several laps of a channel's entries; now and then what was said is unsaid and said anew; the
    next round begins.
    """
    draw = random.Random(seed)
    s = Script()
    signature = draw.getrandbits(62)
    for n in range(1, times + 1):
        number = (n // 40) << 48 | n
        if draw.random() < 0.5:  # else the same op again, as a training loop has it
            signature = draw.getrandbits(62)
        if draw.random() < 0.3:
            s.announce(number, (signature ^ 1, n * 8 + 1, 0))
            s.withdraw(number)
            s.withdraw(number)  # no effect, like that of one whose place is taken
            s.withdraw(max(number - 1 - ENTRIES, 1))
        s.announce(number, (signature, n * 8 + 1, draw.randint(0, 10)))
    return s


def step_through(driver: Path, folder: Path) -> str:
    """Kill the writer at every instruction."""
    s = script()
    board = Board(folder / "rank0.board", 0, 777)
    assert board.add_channel(7, {"name": "0"}) == SLOT
    copy = folder / "copy.board"
    copy.write_bytes(board.path.read_bytes())
    found = stepped.step(driver, "board", board.path, s.lines, folder)
    count = partly = 0
    numbers = sorted({number for held in s.entries for number, _ in held.values()})
    last = stepped.State(0, 0, 0)
    with copy.open("r+b") as file, mmap.mmap(file.fileno(), 0) as image:
        peer = PeerBoard(copy)
        for last in stepped.states(found, image):
            check(peer, s, numbers, last)
            count += 1
            partly += last.begun != last.done
        assert peer.channel(7) == {"name": "0"}
    assert (last.begun, last.done) == (len(s.lines), len(s.lines)), last
    return (
        f"{last.instructions} instructions of {len(s.lines)} calls left {count} states, {partly} of"
        " them in the middle of a call: each was read, with every announcement that stood"
    )


def check(peer: PeerBoard, s: Script, numbers: list[int], state: stepped.State) -> None:
    """That a peer reads what stood before a line of the script, or what stands after it, and never
    anything else.
    """
    slot = peer.slot(7)
    assert slot == SLOT
    for number in numbers:
        before, later, got = (
            s.read(state.done, number),
            s.read(state.begun, number),
            peer.announced(slot, number),
        )
        # In the middle of a call, the entry that it is about may not be there.
        allowed = {before, later} | ({None} if before != later else set())
        assert got in allowed, f"{state}: {number:x} reads {got}, not one of {allowed}"
    assert peer.last_number(slot) in (s.last[state.done], s.last[state.begun]), state
