"""The watcher's look at the hardware of its node."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from node_files import NodeFiles, gpu_address

from commlens.config import Settings
from commlens.health import ras
from commlens.model.health import RasReport
from commlens.processes import process
from commlens.watch.node_health import HealthOfNode, root_of
from commlens.watch.roster import Member


def me() -> Member:
    return Member(os.getpid(), 0, 0, 1, 1, 0, process.Handle.invisible(os.getpid()))


def test_off_watches_nothing() -> None:
    health = HealthOfNode(replace(Settings(), health="off"))
    health.add([me()])
    health.look_now()
    assert health.report([me()]) is None
    health.close()


def test_the_folder_of_the_setting_is_read(tmp_path: Path) -> None:
    NodeFiles(tmp_path, gpus=2)
    settings = replace(Settings(), health=str(tmp_path))
    assert root_of(settings) == tmp_path and root_of(Settings()) == Path("/")
    health = HealthOfNode(settings)
    try:
        health.add([me()])
        health.look_now()
        told = health.report([me()])
    finally:
        health.close()
    assert told is not None and told.networks == ["mlx5_0", "mlx5_1", "eth0"]
    assert [(place.rank, place.gpu) for place in told.ranks] == [(0, gpu_address(1))]


def test_only_the_variables_that_matter_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    health = HealthOfNode(Settings())
    try:
        monkeypatch.setattr(
            process, "environment", lambda _: {"SECRET": "x", "NCCL_IB_HCA": "mlx5_1"}
        )
        health.add([me()])
        assert list(health._environments.values()) == [{"NCCL_IB_HCA": "mlx5_1"}]
    finally:
        health.close()


@pytest.mark.parametrize("ask_ras", [False, True])
def test_ras_is_asked_at_its_usual_address_if_it_should_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ask_ras: bool
) -> None:
    NodeFiles(tmp_path)
    asked: list[Mapping[str, str]] = []

    def ask(environment: Mapping[str, str]) -> RasReport:
        asked.append(environment)
        return RasReport(answered=False, problem="Connection refused")

    monkeypatch.setattr(ras, "ask", ask)
    health = HealthOfNode(replace(Settings(), health=str(tmp_path)))
    try:
        health.look_now(ask_ras=ask_ras)
        told = health.report([me()])
    finally:
        health.close()
    assert told is not None and (told.ras is not None) == ask_ras
    assert asked == [{}] * ask_ras
