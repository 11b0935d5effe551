"""The state and the counters of GPUs: NVIDIA's through NVML or ``nvidia-smi``, AMD's through /sys.

A part is a GPU's PCI address.
"""

from __future__ import annotations

import contextlib
import csv
import io
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from commlens.health.sources import (
    ROOT,
    UnreadableError,
    folders,
    normal_address,
    number,
    output_of,
    pci_address,
    word,
)
from commlens.model.health import Value, Values

SMI_TIMEOUT_S: Final = 5.0
SMI_FILE: Final = "nvidia-smi.csv"
"""Below a root other than ``/``: the output of ``nvidia-smi --query-gpu=... --format=csv``."""

PROCESSES_FILE: Final = "nvidia-smi-apps.csv"
"""The output of ``nvidia-smi --query-compute-apps=gpu_bus_id,pid --format=csv``."""

_SMI_NAMES: Final = {
    "index": "index",
    "pci.bus_id": "address",
    "name": "name",
    "temperature.gpu": "temperature_c",
    "power.draw": "power_w",
    "utilization.gpu": "used_percent",
    "clocks.sm": "clock_mhz",
    "clocks_throttle_reasons.active": "throttle_reasons",
    "ecc.errors.uncorrected.volatile.total": "ecc_uncorrected",
    "ecc.errors.corrected.volatile.total": "ecc_corrected",
    "remapped_rows.uncorrectable": "rows_remapped",
    "remapped_rows.failure": "remap_failed",
    "retired_pages.double_bit.count": "pages_retired",
    "pcie.link.gen.current": "pcie_generation",
    "pcie.link.gen.max": "pcie_generation_max",
    "pcie.link.width.current": "pcie_width",
    "pcie.link.width.max": "pcie_width_max",
}
_SMI_RECENT: Final = frozenset(
    {"remapped_rows.uncorrectable", "remapped_rows.failure", "retired_pages.double_bit.count"}
)
"""Fields that some drivers do not know."""

_RENAMED: Final = {
    "clocks_event_reasons.active": "clocks_throttle_reasons.active",
    "clocks.current.sm": "clocks.sm",
}
"""The requested field of each column that has another name than its field (driver 580)."""

_TEXTS: Final = frozenset({"name", "address"})


class Gpus:
    """Reads the GPUs of a node, in the way that works there.

    Args:
        root: the folder below which the node's files are. Below another than ``/``, NVIDIA's GPUs
            are read from a file.

    Raises:
        UnreadableError: there are GPUs, but neither a library nor a command that reads them.
    """

    def __init__(self, root: Path = ROOT) -> None:
        self._root = root
        self._nvidia: Callable[[], Values] = dict
        if root != ROOT:
            if (root / SMI_FILE).exists():
                self._nvidia = lambda: gpus_in_csv(word(self._root / SMI_FILE))
        elif (root / "proc/driver/nvidia").exists() or (root / "dev/nvidiactl").exists():
            self._nvidia = _nvml() or _smi()

    def read(self) -> Values:
        """Return the values of all GPUs."""
        found = read_amd(self._root)
        for address, values in self._nvidia().items():
            pci = self._root / "sys/bus/pci/devices" / address
            found[address] = {**_widths(pci), **values}
        return found

    def processes(self) -> dict[int, str]:
        """Return the GPU of each process that computes on one, by pid; nothing if it is unknown."""
        found = amd_processes(self._root)
        if self._root != ROOT:
            return found | processes_in_csv(word(self._root / PROCESSES_FILE))
        if isinstance(self._nvidia, (_Nvml, _Smi)):
            found |= self._nvidia.processes()
        return found

    def close(self) -> None:
        """Release the devices. Afterwards nothing can be read."""
        if isinstance(self._nvidia, _Nvml):
            self._nvidia.close()


# --- NVML


class _Nvml:
    """NVIDIA's library, through the package nvidia-ml-py."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def __call__(self) -> Values:
        return {
            address: {"index": float(index), **self._values(gpu)}
            for index, address, gpu in self._gpus()
        }

    def _gpus(self) -> Iterator[tuple[int, str, Any]]:
        """Yield the index, the PCI address and the handle of each GPU that answers."""
        library = self._library
        for index in range(library.nvmlDeviceGetCount()):
            try:
                gpu = library.nvmlDeviceGetHandleByIndex(index)
                address = _text(library.nvmlDeviceGetPciInfo(gpu).busId)
            except library.NVMLError:
                continue
            yield index, normal_address(address), gpu

    def _values(self, gpu: Any) -> dict[str, Value]:
        library, found = self._library, {}
        asked: dict[str, Callable[[], Any]] = {
            "name": lambda: _text(library.nvmlDeviceGetName(gpu)),
            "temperature_c": lambda: library.nvmlDeviceGetTemperature(gpu, 0),
            "power_w": lambda: library.nvmlDeviceGetPowerUsage(gpu) / 1000,
            "used_percent": lambda: library.nvmlDeviceGetUtilizationRates(gpu).gpu,
            "clock_mhz": lambda: library.nvmlDeviceGetClockInfo(gpu, 1),
            "throttle_reasons": lambda: library.nvmlDeviceGetCurrentClocksThrottleReasons(gpu),
            "ecc_uncorrected": lambda: library.nvmlDeviceGetTotalEccErrors(gpu, 1, 0),
            "ecc_corrected": lambda: library.nvmlDeviceGetTotalEccErrors(gpu, 0, 0),
            "rows_remapped": lambda: library.nvmlDeviceGetRemappedRows(gpu)[1],
            "remap_failed": lambda: library.nvmlDeviceGetRemappedRows(gpu)[3],
            "pcie_generation": lambda: library.nvmlDeviceGetCurrPcieLinkGeneration(gpu),
            "pcie_generation_max": lambda: library.nvmlDeviceGetMaxPcieLinkGeneration(gpu),
            "pcie_width": lambda: library.nvmlDeviceGetCurrPcieLinkWidth(gpu),
            "pcie_width_max": lambda: library.nvmlDeviceGetMaxPcieLinkWidth(gpu),
            "nvlinks": lambda: self._nvlinks(gpu),
            "nvlink_mb_s": lambda: self._field(gpu, "NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON"),
        }
        for name, ask in asked.items():
            # a GPU without ECC, or a driver older than the function
            with contextlib.suppress(library.NVMLError, AttributeError, IndexError):
                value = ask()
                found[name] = value if isinstance(value, str) else float(value)
        return found

    def _nvlinks(self, gpu: Any) -> int:
        """Return how many NVLinks of a GPU are active."""
        library, active = self._library, 0
        for link in range(library.NVML_NVLINK_MAX_LINKS):
            try:
                active += library.nvmlDeviceGetNvLinkState(gpu, link) == 1
            except (library.NVMLError_NotSupported, library.NVMLError_InvalidArgument):
                break
        return active

    def _field(self, gpu: Any, name: str) -> int:
        (value,) = self._library.nvmlDeviceGetFieldValues(gpu, [getattr(self._library, name)])
        if value.nvmlReturn:
            raise self._library.NVMLError(value.nvmlReturn)
        return int(value.value.uiVal)

    def processes(self) -> dict[int, str]:
        """Return the GPU of each process that computes on one, by pid."""
        library, found = self._library, {}
        for _, address, gpu in self._gpus():
            with contextlib.suppress(library.NVMLError):
                for process in library.nvmlDeviceGetComputeRunningProcesses(gpu):
                    found[process.pid] = address
        return found

    def close(self) -> None:
        """End the library, which holds the devices open."""
        with contextlib.suppress(self._library.NVMLError):
            self._library.nvmlShutdown()


def _nvml() -> Callable[[], Values] | None:
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # not installed, or no driver that it works with
        return None
    return _Nvml(pynvml)


def _text(value: bytes | str) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


# --- nvidia-smi


class _Smi:
    """NVIDIA's command."""

    def __init__(self, program: str) -> None:
        self._program = program
        # one field that the driver does not know, and it prints nothing
        sets = (list(_SMI_NAMES), [name for name in _SMI_NAMES if name not in _SMI_RECENT])
        self._fields = next((fields for fields in sets if self._gpus(fields)), [])
        if not self._fields:
            raise UnreadableError("nvidia-smi did not answer: the driver may have failed")

    def __call__(self) -> Values:
        return gpus_in_csv(self._gpus(self._fields))

    def processes(self) -> dict[int, str]:
        """Return the GPU of each process that computes on one, by pid."""
        return processes_in_csv(self._query("--query-compute-apps=gpu_bus_id,pid"))

    def _gpus(self, fields: Iterable[str]) -> str:
        return self._query(f"--query-gpu={','.join(fields)}")

    def _query(self, what: str) -> str:
        output = output_of([self._program, what, "--format=csv"], SMI_TIMEOUT_S)
        return output.decode("utf-8", "replace")


def _smi() -> _Smi:
    program = shutil.which("nvidia-smi")
    if program is None:
        raise UnreadableError(
            "NVIDIA's GPUs cannot be read without nvidia-smi or the package nvidia-ml-py:"
            " pip install 'commlens[gpu]'"
        )
    return _Smi(program)


def gpus_in_csv(text: str) -> Values:
    """Return the values of each GPU in a table of ``nvidia-smi --format=csv``."""
    values: Values = {}
    for row in _rows(text):
        found: dict[str, Value] = {}
        for field, cell in row.items():
            name = _SMI_NAMES.get(_RENAMED.get(field, field))
            value = _cell(cell, is_text=name in _TEXTS) if name is not None else None
            if name is not None and value is not None:
                found[name] = value
        address = found.pop("address", "")
        if isinstance(address, str) and address:
            values[normal_address(address)] = found
    return values


def processes_in_csv(text: str) -> dict[int, str]:
    """Return the GPU of each process in such a table, by pid."""
    return {
        int(row["pid"]): normal_address(row["gpu_bus_id"])
        for row in _rows(text)
        if row.get("pid", "").isdecimal() and row.get("gpu_bus_id")
    }


def _rows(text: str) -> list[dict[str, str]]:
    """Return the rows by the names of the columns, without their units."""
    rows = list(csv.reader(io.StringIO(text), skipinitialspace=True))
    names = [name.partition(" [")[0].strip() for name in rows[0]] if rows else []
    return [
        dict(zip(names, (cell.strip() for cell in row), strict=False)) for row in rows[1:] if row
    ]


def _cell(text: str, *, is_text: bool) -> Value | None:
    """Return the value of a cell: ``"325.10 W"`` is 325.1; None if it is not available."""
    if is_text:
        return text
    if text.startswith("0x"):
        with contextlib.suppress(ValueError):
            return float(int(text, 16))
    if text in ("Yes", "No"):
        return float(text == "Yes")
    try:
        return float(text.partition(" ")[0])
    except ValueError:
        return None


# --- /sys


def read_amd(root: Path) -> Values:
    """Return the values of each AMD GPU, as its driver shows them in /sys."""
    values: Values = {}
    for card in folders(root / "sys/class/drm"):
        device = card / "device"
        busy = number(device / "gpu_busy_percent")
        address = pci_address(device)
        if busy is None or not address or "-" in card.name:
            continue
        found: dict[str, Value] = {"used_percent": busy, **_widths(device), **_amd_errors(device)}
        for name, file, per_unit in (
            ("temperature_c", "temp1_input", 1000),
            ("power_w", "power1_average", 1_000_000),
        ):
            for sensor in folders(device / "hwmon"):
                if (value := number(sensor / file)) is not None:
                    found[name] = value / per_unit
        values[address] = found
    for index, address in enumerate(sorted(values)):  # as ROCm numbers them
        values[address]["index"] = float(index)
    return values


def _amd_errors(device: Path) -> dict[str, Value]:
    """Return the counts of an AMD GPU's memory errors, for the kinds of errors that it counts."""
    lines = [
        line.partition(":")
        for file in folders(device / "ras")
        if file.name.endswith("_err_count")
        for line in word(file).splitlines()
    ]
    found: dict[str, Value] = {}
    for name, counter in (("ecc_uncorrected", "ue"), ("ecc_corrected", "ce")):
        counts = [
            float(text) for kind, _, text in lines if kind == counter and text.strip().isdecimal()
        ]
        if counts:
            found[name] = sum(counts)
    return found


def amd_processes(root: Path) -> dict[int, str]:
    """Return the AMD GPU on which each process has memory, by pid."""
    kfd = root / "sys/class/kfd/kfd"
    addresses: dict[str, str] = {}
    for node in folders(kfd / "topology/nodes"):
        properties = dict(
            line.split(" ", 1)
            for line in word(node / "properties").splitlines()
            if line.startswith(("location_id ", "domain "))
        )
        identity = word(node / "gpu_id")
        with contextlib.suppress(KeyError, ValueError):
            location, domain = int(properties["location_id"]), int(properties.get("domain", "0"))
            if identity not in ("", "0"):
                bus, device, function = location >> 8, (location >> 3) & 0x1F, location & 7
                addresses[identity] = f"{domain:04x}:{bus:02x}:{device:02x}.{function}"
    return {
        int(process.name): addresses[identity]
        for process in folders(kfd / "proc")
        if process.name.isdecimal()
        for identity in addresses
        if number(process / f"vram_{identity}")
    }


def _widths(device: Path) -> dict[str, Value]:
    """Return the number of PCIe lanes that a device uses, and can use."""
    read = {
        "pcie_width": number(device / "current_link_width"),
        "pcie_width_max": number(device / "max_link_width"),
    }
    return {name: value for name, value in read.items() if value}
