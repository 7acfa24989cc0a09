"""What is computed from weights alone is followed until data comes in."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from opensmd.modelparallel.dry_run.observing.weight_terms import WeightTerms


class Net:
    """Two layers of different units, looked at from outside of them."""

    def __init__(self) -> None:
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.stack: list[str] = []
        self.in_leaf = False
        owners = {
            id(parameter): [name]
            for name, layer in (("first", self.first), ("second", self.second))
            for parameter in layer.parameters()
        }
        self.terms = WeightTerms(owners, self.stack, {"first": 1, "second": 3}, lambda: self.in_leaf)

    def run(self, out: Tensor, *inputs: Tensor) -> bool:
        """An operation with these inputs has made ``out``."""
        return self.terms.follows(inputs, out)


def test_a_penalty_is_followed_from_each_weight_to_the_number() -> None:
    net = Net()
    squares = [layer.weight.square() for layer in (net.first, net.second)]
    assert net.run(squares[0], net.first.weight) and net.run(squares[1], net.second.weight)
    total = squares[0].sum() + squares[1].sum()
    assert net.run(total, *squares)
    assert total in net.terms
    assert dict(net.terms.sources(total)) == {id(net.first.weight): False, id(net.second.weight): False}


def test_an_operation_runs_with_the_last_unit_that_owns_its_weights() -> None:
    net = Net()
    assert net.terms.unit_of([net.first.weight], 7) == 1
    assert net.terms.unit_of([net.second.weight, net.first.weight], 7) == 3


def test_a_weight_whose_unit_is_not_known_yet_is_taken_where_the_run_is() -> None:
    net = Net()
    net.terms = WeightTerms({id(net.first.weight): ["first"]}, [], {}, lambda: False)
    assert net.terms.unit_of([net.first.weight], 7) == 7


def test_a_weight_in_another_form_is_told_from_a_number_made_of_it() -> None:
    net = Net()
    turned, row = net.first.weight.t().contiguous(), net.first.weight[0].clone()
    assert net.run(turned, net.first.weight) and net.run(row, net.first.weight)
    assert dict(net.terms.sources(turned)) == {id(net.first.weight): True}
    assert dict(net.terms.sources(row)) == {id(net.first.weight): False}


def test_half_of_a_weight_is_still_the_weight() -> None:
    net = Net()
    half, less = net.first.weight[:2].clone(), net.first.weight[:2, :3].clone()
    assert net.run(half, net.first.weight) and net.run(less, net.first.weight)
    assert dict(net.terms.sources(half)) == {id(net.first.weight): True}
    assert dict(net.terms.sources(less)) == {id(net.first.weight): False}


def test_a_weight_that_others_are_written_into_is_itself_and_nothing_made_of_them() -> None:
    net = Net()
    assert net.run(net.second.weight, net.first.weight)
    assert net.second.weight not in net.terms
    assert net.terms.unit_of([net.second.weight], 7) == 3


def test_what_has_no_memory_to_know_it_by_is_not_followed() -> None:
    net = Net()
    sparse = net.first.weight.detach().to_sparse()
    assert net.run(sparse, net.first.weight) and net.run(net.first.weight * 2, net.first.weight)
    assert sparse not in net.terms


def test_a_tensor_in_the_memory_of_one_that_is_gone_is_another() -> None:
    net = Net()
    made = net.first.weight.detach().clone()
    assert net.run(made, net.first.weight)
    assert made in net.terms
    del made
    others = [torch.empty(4, 4) for _ in range(1000)]  # one would get the memory that is free again
    assert not any(other in net.terms for other in others)


def test_a_weight_that_two_modules_own_is_none_of_others_while_one_of_them_runs() -> None:
    net = Net()
    owners = {id(net.first.weight): ["first", "second"]}
    net.terms = WeightTerms(owners, ["second"], {"first": 1, "second": 3}, lambda: False)
    assert not net.run(net.first.weight * 2, net.first.weight)


def test_data_beside_a_weight_ends_it() -> None:
    net = Net()
    product = net.first.weight @ torch.ones(4)
    assert not net.run(product, net.first.weight, torch.ones(4))
    assert product not in net.terms
    assert not net.run(torch.ones(2), torch.ones(2))


def test_a_module_that_uses_its_own_weights_computes_no_such_term() -> None:
    net = Net()
    net.stack.append("first")
    assert not net.run(net.first.weight * 2, net.first.weight)
    assert net.run(net.second.weight * 2, net.second.weight)


def test_a_module_that_is_never_divided_needs_weights_where_it_is() -> None:
    net = Net()
    net.in_leaf = True
    assert not net.run(net.first.weight * 2, net.first.weight)
