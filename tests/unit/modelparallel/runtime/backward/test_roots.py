"""What a backward begins with."""

from __future__ import annotations

import pytest
import torch

from opensmd.modelparallel.runtime.backward.roots import latest_first, root_gradient, root_pairs


def loss(*shape: int) -> torch.Tensor:
    return torch.ones(shape, requires_grad=True) * 2


def test_a_loss_has_its_share_of_the_batchs_mean_as_gradient() -> None:
    assert root_gradient(loss(), None, 0.25).item() == 0.25
    assert root_gradient(loss(1, 1), None).tolist() == [[1.0]]
    given = torch.tensor([1.0, 2.0])
    assert root_gradient(loss(2), given) is given
    assert root_gradient(loss(2), given, 0.5).tolist() == [0.5, 1.0]


def test_impossible_roots_are_refused_in_torchs_words() -> None:
    with pytest.raises(RuntimeError, match="does not require grad and does not have a grad_fn"):
        root_gradient(torch.ones(()), None)
    with pytest.raises(RuntimeError, match=r"only for scalar outputs, and this one has shape \(2,\)"):
        root_gradient(loss(2), None)
    with pytest.raises(RuntimeError, match=r"Mismatch in shape: a gradient has shape \(3,\)"):
        root_gradient(loss(2), torch.ones(3))


def test_every_root_gets_a_gradient_or_none() -> None:
    one, two = loss(), loss()
    gradient = torch.ones(())
    assert root_pairs(one, None) == ([one], [None])
    assert root_pairs((one, two), gradient) == ([one, two], [gradient, gradient])
    assert root_pairs([one, two], [None, gradient]) == ([one, two], [None, gradient])
    with pytest.raises(ValueError, match="got 2 tensors and 1 gradients"):
        root_pairs([one, two], [gradient])
    with pytest.raises(TypeError, match="expected a tensor or a sequence of tensors, got float"):
        root_pairs([one, 1.0], None)  # type: ignore[list-item]


def test_roots_are_put_in_the_reverse_order_of_their_creation() -> None:
    leaf = torch.ones((), requires_grad=True)
    first, second, third = leaf * 2, leaf * 3, leaf * 4
    gradients = [torch.tensor(float(number)) for number in range(4)]
    roots, given = latest_first([second, first, leaf, third], gradients)
    assert [id(root) for root in roots] == [id(each) for each in (leaf, third, second, first)]
    assert [each.item() for each in given] == [2.0, 3.0, 0.0, 1.0]
