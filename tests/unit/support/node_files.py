"""Makes the files that tell of a node's hardware, as Linux and NVIDIA's tools write them."""

from __future__ import annotations

import json
import socket
import threading
from datetime import datetime, timezone
from pathlib import Path

GPU = "0000:{:02x}:00.0"
"""The PCI address of a GPU, by 0x10 and its index."""

_SMI_FIELDS = (
    "index",
    "pci.bus_id",
    "name",
    "temperature.gpu",
    "clocks_event_reasons.active",
    "ecc.errors.uncorrected.volatile.total",
    "ecc.errors.corrected.volatile.total",
    "pcie.link.width.current",
    "pcie.link.width.max",
)


def gpu_address(index: int) -> str:
    return GPU.format(0x10 + index)


class NodeFiles:
    """The files of one node: healthy at first, with ``gpus`` GPUs, two InfiniBand ports and eth0."""

    def __init__(self, root: Path, *, gpus: int = 0) -> None:
        self.root = root
        self._gpus = {
            index: {
                "index": str(index),
                "pci.bus_id": f"0000{gpu_address(index).upper()}",
                "name": "NVIDIA H100 80GB HBM3",
                "temperature.gpu": "41",
                "clocks_event_reasons.active": "0x0000000000000000",
                "ecc.errors.uncorrected.volatile.total": "0",
                "ecc.errors.corrected.volatile.total": "0",
                "pcie.link.width.current": "16",
                "pcie.link.width.max": "16",
            }
            for index in range(gpus)
        }
        for number, name in enumerate(("mlx5_0", "mlx5_1")):
            port = f"sys/class/infiniband/{name}"
            self.write(f"{port}/device/uevent", f"PCI_SLOT_NAME=0000:8{number}:00.0\n")
            self.write(f"{port}/ports/1/state", "4: ACTIVE\n")
            self.write(f"{port}/ports/1/phys_state", "5: LinkUp\n")
            self.write(f"{port}/ports/1/rate", "400 Gb/sec (4X NDR)\n")
            self.write(f"{port}/ports/1/link_layer", "InfiniBand\n")
            for counter in ("symbol_error", "link_downed", "port_rcv_errors", "port_xmit_wait"):
                self.write(f"{port}/ports/1/counters/{counter}", "0\n")
        interface = "sys/class/net/eth0"
        self.write(f"{interface}/operstate", "up\n")
        self.write(f"{interface}/speed", "100000\n")
        self.write(f"{interface}/carrier_down_count", "1\n")
        self.write(f"{interface}/device/uevent", "PCI_SLOT_NAME=0000:90:00.0\n")
        for counter in ("rx_errors", "tx_errors", "rx_dropped"):
            self.write(f"{interface}/statistics/{counter}", "0\n")
        self.retransmits(100)
        self.pressure(memory_s=0.0, io_s=0.0)
        self.write("proc/meminfo", "MemTotal: 1000 kB\nMemAvailable: 800 kB\nSwapTotal: 0 kB\n")
        self.write("proc/vmstat", "pswpin 0\npswpout 0\noom_kill 0\n")
        self.mounts(0)
        self.write("kern.log", "")
        self._write_gpus()

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def log(self, text: str, at_ns: int) -> None:
        """Add a line to the kernel's log, as rsyslog writes it."""
        moment = datetime.fromtimestamp(at_ns / 1e9, timezone.utc).isoformat(
            timespec="microseconds"
        )
        with (self.root / "kern.log").open("a") as file:
            file.write(f"{moment} node kernel: [12345.678] {text}\n")

    def port(self, name: str, **values: str) -> None:
        """Set files of an InfiniBand port, or counters of it."""
        folder = f"sys/class/infiniband/{name}/ports/1"
        for key, value in values.items():
            place = folder if (self.root / folder / key).exists() else f"{folder}/counters"
            self.write(f"{place}/{key}", f"{value}\n")

    def interface(self, name: str, **values: str) -> None:
        """Set files of a network interface, or counters of it."""
        folder = f"sys/class/net/{name}"
        for key, value in values.items():
            place = folder if (self.root / folder / key).exists() else f"{folder}/statistics"
            self.write(f"{place}/{key}", f"{value}\n")

    def gpu(self, index: int, **values: str) -> None:
        """Set cells in the table of nvidia-smi, whose names have underscores for dots."""
        names = {name.replace(".", "_"): name for name in _SMI_FIELDS}
        self._gpus[index] |= {names[name]: value for name, value in values.items()}
        self._write_gpus()

    def lose_gpu(self, index: int) -> None:
        """Take a GPU out of the table of nvidia-smi."""
        del self._gpus[index]
        self._write_gpus()

    def _write_gpus(self) -> None:
        if self._gpus:
            rows = [", ".join(_SMI_FIELDS)]
            rows += [", ".join(each[name] for name in _SMI_FIELDS) for each in self._gpus.values()]
            self.write("nvidia-smi.csv", "".join(f"{row}\n" for row in rows))

    def processes(self, gpus: dict[int, int]) -> None:
        """Write nvidia-smi's table of processes: the index of the GPU by pid."""
        rows = "".join(f"0000{gpu_address(gpu).upper()}, {pid}\n" for pid, gpu in gpus.items())
        self.write("nvidia-smi-apps.csv", f"gpu_bus_id, pid\n{rows}")

    def retransmits(self, count: int) -> None:
        """Set how many TCP segments were sent again."""
        self.write("proc/net/snmp", f"Tcp: InSegs OutSegs RetransSegs\nTcp: 9 100000 {count}\n")

    def mounts(self, timeouts: int) -> None:
        """Set how many requests to the server of NFS have timed out."""
        self.write(
            "proc/self/mountstats",
            "device 10.0.0.9:/data mounted on /data with fstype nfs4 statvers=1.1\n"
            f"\t        READ: 900 900 {timeouts} 1 1 0 0 0 0\n",
        )

    def pressure(self, *, memory_s: float, io_s: float) -> None:
        """Set for how long all tasks have waited."""
        for what, seconds in (("memory", memory_s), ("io", io_s)):
            line = "avg10=0.00 avg60=0.00 avg300=0.00 total="
            total = round(seconds * 1e6)
            self.write(f"proc/pressure/{what}", f"some {line}{total}\nfull {line}{total}\n")


class RasServer:
    """A service on a local port that speaks the protocol of NCCL's RAS.

    Args:
        communicators: of the answer in JSON; None: an older NCCL, which knows only text.
        text: the answer to ``VERBOSE STATUS`` in text.
        answers: False: it accepts connections and says nothing.
    """

    def __init__(
        self,
        communicators: list[dict[str, object]] | None = None,
        text: str = "",
        *,
        answers: bool = True,
    ) -> None:
        self._communicators = communicators
        self._text = text
        self._answers = answers
        self.commands: list[str] = []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def __enter__(self) -> RasServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(5)

    @property
    def environment(self) -> dict[str, str]:
        return {"NCCL_RAS_ADDR": f"127.0.0.1:{self.port}"}

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection:
                self._converse(connection)

    def _converse(self, connection: socket.socket) -> None:
        wants_json = False
        for line in connection.makefile("r"):
            command = line.strip().lower()
            self.commands.append(command)
            if not self._answers:
                continue
            if command.startswith("client protocol "):
                answer = "SERVER PROTOCOL 2\n"
            elif command.startswith("timeout "):
                answer = "OK\n"
            elif command == "set format json" and self._communicators is not None:
                wants_json, answer = True, "OK\n"
            elif command in ("status", "verbose status"):
                content = {"nccl_version": "2.28.3", "communicators": self._communicators}
                connection.sendall((json.dumps(content) if wants_json else self._text).encode())
                return
            else:
                answer = f"ERROR: Unknown command {line.strip()}\n"
            connection.sendall(answer.encode())


def communicator(
    pids: list[int], counts: list[int], *, silent: tuple[int, ...] = ()
) -> dict[str, object]:
    """A communicator in RAS's JSON, by the pids of its ranks and how many AllReduces each has
    launched.
    """

    def rank(number: int) -> dict[str, object]:
        return {
            "rank": number,
            "host": "10.0.0.1",
            "pid": pids[number],
            "cuda_dev": number,
            "nvml_dev": number,
        }

    return {
        "hash": "0x1f2e3d",
        "size": len(pids),
        "ranks": [
            {
                **rank(number),
                "status": {"init_state": 0, "async_error": 0, "abort_flag": False},
                "collective_counts": {"Broadcast": 1, "AllReduce": count},
            }
            for number, count in enumerate(counts)
            if number not in silent
        ],
        "missing_ranks": [
            {**rank(number), "status": {"unresponsive": True, "considered_dead": False}}
            for number in silent
        ],
    }
