"""The relay's process. A rank starts it (``verification/link.py``)."""

from __future__ import annotations

import fcntl
import json
import socket
import sys
import time
from pathlib import Path
from typing import Final

from commlens.verification.relay.node_relay import Relay

# the longest wait for the relay of an earlier start of the job, whose ranks have ended
LOCK_S: Final = 5.0


def main(arguments: list[str]) -> None:
    """Run the relay: folder, world size, address to listen at ("" if this is not the hub), and an
    inherited socket to the rank that starts it.
    """
    folder, world_size, address = Path(arguments[0]), int(arguments[1]), arguments[2]
    rank = socket.socket(fileno=int(arguments[3]))
    sys.setswitchinterval(0.0005)  # the threads hand over to each other quickly
    with (folder / "relay.lock").open("w") as lock:
        until = time.monotonic() + LOCK_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > until:
                    return  # another rank has started one
                time.sleep(0.02)
        relay = Relay(folder, world_size, is_hub=bool(address))
        failed = True
        try:
            if address:
                rank.sendall(json.dumps(relay.others.listen(address)).encode() + b"\n")
                rank.close()
            else:
                relay.take_offers(rank)
            relay.run()
            failed = False
        except Exception as error:
            relay.say(
                "strict verification goes on within this node only: its relay failed:"
                f" {type(error).__name__}: {error}"
            )
        finally:
            relay.close(failed=failed)


if __name__ == "__main__":
    main(sys.argv[1:])
