"""GPUs, from tables of nvidia-smi, NVML's functions and AMD's files."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from node_files import NodeFiles, gpu_address

from commlens.health import gpus
from commlens.health.gpus import Gpus, gpus_in_csv, processes_in_csv, read_amd
from commlens.health.sources import UnreadableError

TABLE = """index, pci.bus_id, name, temperature.gpu, power.draw [W], clocks_throttle_reasons.active, \
ecc.errors.uncorrected.volatile.total, remapped_rows.failure, pcie.link.width.current
0, 00000000:4F:00.0, NVIDIA A100-SXM4-80GB, 36, 61.50 W, 0x0000000000000001, 0, No, 16
1, 00000000:52:00.0, NVIDIA A100-SXM4-80GB, 88, 401.03 W, 0x0000000000000040, [N/A], Yes, 8
"""


def test_a_table_of_nvidia_smi() -> None:
    found = gpus_in_csv(TABLE)
    assert list(found) == ["0000:4f:00.0", "0000:52:00.0"]
    first, second = found.values()
    assert (first["index"], first["name"]) == (0.0, "NVIDIA A100-SXM4-80GB")
    assert (first["temperature_c"], first["power_w"], first["ecc_uncorrected"]) == (36.0, 61.5, 0.0)
    assert (second["throttle_reasons"], second["pcie_width"]) == (64.0, 8.0)
    assert second["remap_failed"] == 1.0 and "ecc_uncorrected" not in second


OF_AN_H200 = """index, pci.bus_id, name, temperature.gpu, power.draw [W], utilization.gpu [%], \
clocks.current.sm [MHz], clocks_event_reasons.active, ecc.errors.uncorrected.volatile.total, \
ecc.errors.corrected.volatile.total, remapped_rows.uncorrectable, remapped_rows.failure, \
retired_pages.double_bit.count, pcie.link.gen.current, pcie.link.gen.max, pcie.link.width.current, \
pcie.link.width.max
0, 00000000:00:06.0, NVIDIA H200, 43, 266.24 W, 100 %, 1980 MHz, 0x0000000000000000, 0, 0, 0, No, \
[N/A], 5, 5, 16, 16
"""
"""What driver 580 answers: it names two columns otherwise than the fields that were asked for."""


def test_a_table_of_an_h200() -> None:
    found = gpus_in_csv(OF_AN_H200)["0000:00:06.0"]
    assert found == {
        "index": 0.0,
        "name": "NVIDIA H200",
        "temperature_c": 43.0,
        "power_w": 266.24,
        "used_percent": 100.0,
        "clock_mhz": 1980.0,
        "throttle_reasons": 0.0,
        "ecc_uncorrected": 0.0,
        "ecc_corrected": 0.0,
        "rows_remapped": 0.0,
        "remap_failed": 0.0,
        "pcie_generation": 5.0,
        "pcie_generation_max": 5.0,
        "pcie_width": 16.0,
        "pcie_width_max": 16.0,
    }


@pytest.mark.parametrize("text", ["", "No devices were found\n", "a, b\n\n1\n"])
def test_a_table_without_gpus(text: str) -> None:
    assert gpus_in_csv(text) == {} and processes_in_csv(text) == {}


def test_a_folder_with_tables(tmp_path: Path) -> None:
    files = NodeFiles(tmp_path, gpus=2)
    files.processes({4121: 1, 4120: 0})
    found = Gpus(tmp_path)
    assert sorted(found.read()) == [gpu_address(0), gpu_address(1)]
    assert found.processes() == {4121: gpu_address(1), 4120: gpu_address(0)}


def test_lanes_are_read_where_the_driver_does_not_tell(tmp_path: Path) -> None:
    NodeFiles(tmp_path, gpus=1)
    folder = tmp_path / "sys/bus/pci/devices" / gpu_address(0)
    folder.mkdir(parents=True)
    (folder / "max_link_width").write_text("16\n")
    (tmp_path / gpus.SMI_FILE).write_text(f"index, pci.bus_id\n0, {gpu_address(0)}\n")
    assert Gpus(tmp_path).read()[gpu_address(0)] == {"pcie_width_max": 16.0, "index": 0.0}


def test_amd(tmp_path: Path) -> None:
    files = NodeFiles(tmp_path)
    device = "sys/class/drm/card1/device"
    files.write(f"{device}/uevent", "DRIVER=amdgpu\nPCI_SLOT_NAME=0000:C1:00.0\n")
    files.write(f"{device}/gpu_busy_percent", "97\n")
    files.write(f"{device}/current_link_width", "16\n")
    files.write(f"{device}/ras/umc_err_count", "ue: 1\nce: 4\n")
    files.write(f"{device}/ras/gfx_err_count", "ue: 1\nce: 0\n")
    files.write(f"{device}/hwmon/hwmon3/temp1_input", "65000\n")
    files.write(f"{device}/hwmon/hwmon3/power1_average", "301000000\n")
    assert read_amd(tmp_path) == {
        "0000:c1:00.0": {
            "index": 0.0,
            "temperature_c": 65.0,
            "power_w": 301.0,
            "used_percent": 97.0,
            "pcie_width": 16.0,
            "ecc_uncorrected": 2.0,
            "ecc_corrected": 4.0,
        }
    }


def test_the_processes_on_gpus_of_amd(tmp_path: Path) -> None:
    files = NodeFiles(tmp_path)
    kfd = "sys/class/kfd/kfd"
    for node, (identity, location) in enumerate([("0", 0), ("51140", 0xC100), ("3061", 0xC208)]):
        files.write(f"{kfd}/topology/nodes/{node}/gpu_id", f"{identity}\n")
        files.write(
            f"{kfd}/topology/nodes/{node}/properties",
            f"cpu_cores_count 0\nlocation_id {location}\ndomain 1\n",
        )
    files.write(f"{kfd}/proc/411/vram_51140", "4096\n")
    files.write(f"{kfd}/proc/411/vram_3061", "0\n")
    files.write(f"{kfd}/proc/412/vram_3061", "4096\n")
    assert Gpus(tmp_path).processes() == {411: "0001:c1:00.0", 412: "0001:c2:01.0"}


class _NvmlError(Exception):
    pass


class _NvmlNotSupportedError(_NvmlError):
    pass


class _Library:
    """NVML's functions, of two GPUs of which the second is lost, as a driver of 2024 offers them."""

    NVMLError = _NvmlError
    NVMLError_NotSupported = NVMLError_InvalidArgument = _NvmlNotSupportedError
    NVML_NVLINK_MAX_LINKS = 36
    NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON = 90
    is_open = True

    def nvmlShutdown(self) -> None:
        if not self.is_open:
            raise _NvmlError("Uninitialized")
        self.is_open = False

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index == 1:
            raise _NvmlError("GPU is lost")
        return index

    def nvmlDeviceGetPciInfo(self, gpu: int) -> Any:
        return SimpleNamespace(busId=b"00000000:4F:00.0")

    def nvmlDeviceGetName(self, gpu: int) -> str:
        return "NVIDIA H100"

    def nvmlDeviceGetTotalEccErrors(self, gpu: int, kind: int, counter: int) -> int:
        raise _NvmlError("Not Supported")

    def nvmlDeviceGetRemappedRows(self, gpu: int) -> tuple[int, int, int, int]:
        return (2, 1, 0, 0)

    def nvmlDeviceGetCurrPcieLinkWidth(self, gpu: int) -> int:
        return 16

    def nvmlDeviceGetNvLinkState(self, gpu: int, link: int) -> int:
        if link > 3:
            raise _NvmlNotSupportedError
        return int(link != 1)  # one of four is down

    def nvmlDeviceGetFieldValues(self, gpu: int, fields: list[int]) -> list[Any]:
        return [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=26_562))] * len(fields)

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: int) -> list[Any]:
        return [SimpleNamespace(pid=4121)]


def test_nvml_leaves_out_what_a_gpu_or_driver_lacks() -> None:
    nvml = gpus._Nvml(_Library())
    assert nvml() == {
        "0000:4f:00.0": {
            "index": 0.0,
            "name": "NVIDIA H100",
            "rows_remapped": 1.0,
            "remap_failed": 0.0,
            "pcie_width": 16.0,
            "nvlinks": 3.0,
            "nvlink_mb_s": 26_562.0,
        }
    }
    assert nvml.processes() == {4121: "0000:4f:00.0"}


def test_nvml_is_ended_once_and_for_all() -> None:
    library = _Library()
    nvml = gpus._Nvml(library)
    nvml.close()
    assert not library.is_open
    nvml.close()


SMI = """#!/bin/sh
case "$1" in
*remapped_rows*) echo "Field is not a valid field to query" >&2; exit 2 ;;
--query-gpu=*) printf "index, pci.bus_id\\n0, 00000000:4F:00.0\\n" ;;
--query-compute-apps=*) printf "gpu_bus_id, pid\\n00000000:4F:00.0, 4121\\n" ;;
esac
"""


def test_nvidia_smi_of_an_older_driver(tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(SMI)
    program.chmod(0o755)
    smi = gpus._Smi(str(program))
    assert smi() == {"0000:4f:00.0": {"index": 0.0}}
    assert smi.processes() == {4121: "0000:4f:00.0"}


def test_nvidia_smi_that_fails(tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nexit 9\n")
    program.chmod(0o755)
    with pytest.raises(UnreadableError, match="did not answer"):
        gpus._Smi(str(program))
