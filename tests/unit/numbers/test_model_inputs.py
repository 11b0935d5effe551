"""The ranks that must read other batches."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from forked_calls import OnRanks
from old_torch import fsdp2_on_a_cpu

pytestmark = pytest.mark.launches


@fsdp2_on_a_cpu
def test_the_ranks_of_each_wrapper(on_ranks: OnRanks) -> None:
    import number_inputs  # imports FSDP, which no other worker needs

    for rank, found in enumerate(on_ranks(number_inputs.ranks, None, world_size=4)):
        pair = (rank // 2 * 2, rank // 2 * 2 + 1)
        assert found == {
            "ddp": (0, 1, 2, 3),
            "fsdp1": (0, 1, 2, 3),
            "fsdp2": (0, 1, 2, 3),
            "hsdp": (0, 1, 2, 3),
            "with tensor parallel": (rank % 2, rank % 2 + 2),
            "with a group inside": (),
            "pairs": pair,
        }


@fsdp2_on_a_cpu
def test_ranks_that_share_a_batch_under_fsdp(on_ranks: OnRanks) -> None:
    import number_inputs

    lines = on_ranks(number_inputs.share_a_batch, None, world_size=3)
    assert ["ranks 0-1 have the same batch at step 2" in line for line in lines[0]] == [True]
    assert lines[1] == lines[2] == []
