"""The paths of modules: shared ones, wrappers, and modules that were not there at first."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DataParallel

from commlens.tracing.attribution.module_paths import ModulePaths


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(2, 2))
        self.second = nn.Sequential(nn.Linear(2, 2))


def test_a_shared_module_has_the_path_nearest_to_its_caller() -> None:
    net, paths = Net(), ModulePaths()
    net.second[0] = net.first[0]
    root = paths.row_of(net, None)
    second = paths.row_of(net.second, root)
    shared = paths.row_of(net.second[0], second)
    assert [row.path for row in (root, second, shared)] == ["Net", "Net.second", "Net.second.0"]
    assert paths.other_paths(shared) == ("Net.first.0",)
    paths.row_of(net.first[0], paths.row_of(net.first, root))
    assert paths.other_paths(shared) == ()


def test_modules_outside_of_the_tree_are_named_by_their_class() -> None:
    net, paths = Net(), ModulePaths()
    root = paths.row_of(net, None)
    assert paths.row_of(nn.ReLU(), root).path == "Net.(ReLU)"
    assert paths.row_of(Net(), None).path == "Net#2"
    net.added = nn.ReLU()
    assert paths.row_of(net.added, root).path == "Net.added"


@pytest.mark.parametrize("names_wrappers", [False, True])
def test_a_wrapper_counts_as_what_it_wraps(names_wrappers: bool) -> None:
    net, paths = Net(), ModulePaths()
    paths.names_wrappers = names_wrappers
    wrapper = DataParallel(net)
    expected = "DataParallel" if names_wrappers else "Net"
    assert paths.name_root(wrapper) == expected
    compiled = nn.Module()
    compiled._orig_mod = net  # as torch.compile does
    assert paths.unwrapped(compiled) is net


def test_a_parameter_that_is_replaced_is_found_again() -> None:
    net, paths = Net(), ModulePaths()
    paths.row_of(net, None)
    weight = net.first[0].weight
    assert paths.parameter_path(weight) == "Net.first.0.weight"
    net.first[0].weight = nn.Parameter(torch.ones(2, 2))
    assert paths.parameter_path(net.first[0].weight) == "Net.first.0.weight"
    assert paths.parameter_path(weight) is None
    assert paths.parameter_path(torch.ones(1)) is None


def test_a_module_inside_itself_has_each_path_once() -> None:
    net, paths = Net(), ModulePaths()
    net.first.owner = net
    net.second[0].owner = net.second
    root = paths.row_of(net, None)
    assert paths.paths_of(net) == ["Net"] and paths.paths_of(net.second) == ["Net.second"]
    assert paths.row_of(net.first[0], root).path == "Net.first.0"
    assert paths.parameter_path(net.second[0].weight) == "Net.second.0.weight"
