"""What is known of a model before anything has run."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from opensmd.modelparallel.dry_run.module_tree import ModuleTree, describe


def test_a_module_with_two_names_is_there_once_and_the_other_name_is_an_alias() -> None:
    layer = nn.Linear(2, 3)
    tree = ModuleTree(nn.ModuleDict({"a": layer, "b": layer}))
    assert sorted(tree.names.values()) == ["", "a"] and tree.aliases == {"b": "a"}


def test_a_tensor_that_two_modules_have_counts_for_the_first_and_is_listed_as_shared() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
    model[1].weight = model[0].weight
    tree = ModuleTree(model)
    infos = tree.infos({}, {})
    assert (infos["0"].parameter_bytes, infos["1"].parameter_bytes) == (80, 0)
    assert tree.shared == (("0.weight", "1.weight"),)
    assert tree.owners[id(model[0].weight)] == ["0", "1"]


def test_parameters_in_the_same_memory_are_shared_like_one() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = nn.Parameter(model[0].weight.detach())
    assert ModuleTree(model).shared == (("0.weight", "1.weight"),)


def test_frozen_parameters_and_buffers_are_counted_apart() -> None:
    model = nn.BatchNorm1d(4)
    model.bias.requires_grad_(False)
    info = ModuleTree(model).infos({}, {})[""]
    assert (info.parameters, info.trainable_bytes, info.buffer_bytes) == (8, 16, 4 * 4 + 4 * 4 + 8)


def test_what_is_inside_a_scripted_module_is_not_followed() -> None:
    model = nn.Sequential(torch.jit.script(nn.Sequential(nn.Linear(2, 2))), nn.Linear(2, 2))
    tree = ModuleTree(model)
    assert sorted(tree.followed().values()) == ["", "0", "1"]
    assert sorted(tree.followed({"1"}).values()) == ["", "0", "1"]
    assert tree.infos({}, {})["0"].opaque and not tree.infos({}, {})["1"].opaque


def test_lists_are_containers_and_so_is_a_module_whose_children_others_call() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.ModuleList([nn.ReLU()]))
    infos = ModuleTree(model).infos({}, {"": 1, "0.0": 1})
    assert [name for name, info in infos.items() if info.container] == ["0", "1"]
    called = ModuleTree(model).infos({}, {"": 1, "0": 1, "0.0": 1})
    assert not called["0"].container


def test_a_lazy_parameter_is_named() -> None:
    with pytest.raises(ValueError, match="parameter 'weight' of module '1' is lazy"):
        ModuleTree(nn.Sequential(nn.ReLU(), nn.LazyLinear(2)))


def test_a_model_without_parameters_is_one_unit_and_others_one_for_each_module_that_has_some() -> None:
    assert [unit.module for unit in describe(nn.ReLU()).units] == [""]
    trace = describe(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))
    assert [unit.module for unit in trace.units] == ["0", "2"] and trace.uses == {"0": 0, "2": 1}
    assert [(edge.source, edge.target) for edge in trace.edges] == [(0, 1)]


def test_a_scripted_module_is_one_unit_also_without_a_run() -> None:
    inner = torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    trace = describe(nn.Sequential(nn.Linear(2, 2), nn.Sequential(inner, nn.ReLU()), nn.Linear(2, 2)))
    assert [unit.module for unit in trace.units] == ["0", "1.0", "2"]
    assert trace.uses == {"0": 0, "1.0.0": 1, "1.0.1": 1, "2": 2}
