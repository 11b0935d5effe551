from __future__ import annotations

import msgspec

from commlens.model.nccl import NcclOp, version_text


def test_an_operation_has_stopped_only_if_its_kernel_has_on_all_channels():
    op = NcclOp(1, "AllReduce", "ncclFloat32", 8, channels=2, stopped_on=2, with_kernels=True)
    assert op.has_stopped
    for changed in ({"stopped_on": 1}, {"with_kernels": False}, {"channels": 0, "stopped_on": 0}):
        assert not msgspec.structs.replace(op, **changed).has_stopped


def test_nccls_number_of_its_version():
    assert [version_text(number) for number in (22703, 23007, 0)] == ["2.27.3", "2.30.7", "unknown"]
