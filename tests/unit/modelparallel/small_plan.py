"""A small model and its plan, for tests of what is made of plans."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from opensmd.modelparallel.dry_run.capture import capture
from opensmd.modelparallel.planning.partition import partition
from opensmd.modelparallel.planning.plan import Plan

__all__ = ["block", "make_plan", "model_alone", "model_and_step"]


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU())


def model_alone() -> nn.Module:
    return nn.Sequential(*[block() for _ in range(4)])


def model_and_step() -> tuple[nn.Module, Any]:
    model = model_alone()
    return model, lambda: model(torch.ones(8, 64)).sum()


def make_plan(stages: int = 2) -> Plan:
    return partition(capture(*model_and_step()), stages, memory_weight=0.0, microbatches=4)
