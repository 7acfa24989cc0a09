"""State of another kind of optimizer is refused, that of the same kind is not, of whichever version."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from opensmd.modelparallel.state_dicts.fitting import require_same_kind
from opensmd.optim import FusedAdam, FusedLAMB

KINDS: list[Any] = [
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.ASGD,
    torch.optim.Rprop,
    FusedAdam,
    FusedLAMB,
]


def trained(kind: Any) -> torch.optim.Optimizer:
    parameter = nn.Parameter(torch.ones(2, 2))
    optimizer: torch.optim.Optimizer = kind([parameter], lr=0.1)
    parameter.grad = torch.ones(2, 2)
    optimizer.step()
    return optimizer


def goes_on(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> bool:
    """Whether plain PyTorch does with this state."""
    try:
        optimizer.load_state_dict(saved)
        optimizer.step()
    except KeyError:
        return False
    return True


@pytest.mark.parametrize("kind", KINDS)
def test_state_with_which_a_step_would_fail_is_refused_and_no_other(kind: Any) -> None:
    for other in KINDS:
        saved = trained(other).state_dict()
        try:
            require_same_kind(trained(kind), saved)
            refused = False
        except ValueError:
            refused = True
        assert refused != goes_on(trained(kind), saved), other


def test_what_is_lacking_is_named() -> None:
    with pytest.raises(
        ValueError, match=r"another kind of optimizer than Adam, which needs betas, .*momentum"
    ):
        require_same_kind(trained(torch.optim.Adam), trained(torch.optim.SGD).state_dict())
    with pytest.raises(ValueError, match=r"than Adamax, which needs exp_inf; its settings are amsgrad"):
        require_same_kind(trained(torch.optim.Adamax), trained(torch.optim.Adam).state_dict())


def test_groups_of_an_older_version_with_settings_of_the_script_are_taken() -> None:
    saved = trained(torch.optim.Adam).state_dict()
    for key in ("foreach", "maximize", "capturable", "differentiable", "fused", "amsgrad"):
        del saved["param_groups"][0][key]
    saved["param_groups"][0]["initial_lr"] = 0.1
    require_same_kind(trained(torch.optim.Adam), saved)


def test_entries_may_have_something_else_alone() -> None:
    """A parameter that has not been trained yet has its master in 16 bits, and nothing from the optimizer."""
    saved = trained(torch.optim.Adam).state_dict()
    saved["state"] = {0: {"master_weight": torch.ones(2, 2)}, "rounds": 3}
    require_same_kind(trained(torch.optim.Adam), saved)


def test_of_other_libraries_optimizers_nobody_knows() -> None:
    class Own(torch.optim.Optimizer):
        """Keeps whatever it likes."""

    own = Own([nn.Parameter(torch.ones(1))], {"betas": (0.9, 0.99)})
    for kind in (torch.optim.SGD, torch.optim.Adamax):
        require_same_kind(own, trained(kind).state_dict())
