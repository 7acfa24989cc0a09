"""A placed model: what this rank keeps of it, and what all ranks know about the rest."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from opensmd.modelparallel._torch_internals import has_backward_hooks
from opensmd.modelparallel.compatibility.clipping import ClippingWarning
from opensmd.modelparallel.exceptions import SMPUnsupportedError
from opensmd.modelparallel.planning.plan import Plan
from opensmd.modelparallel.runtime.calls.interception import intercepted
from opensmd.modelparallel.runtime.calls.sequential import Sequences
from opensmd.modelparallel.runtime.messages.step_modes import StepModes
from opensmd.modelparallel.runtime.side_effects.attributes import Places
from opensmd.modelparallel.runtime.side_effects.buffers import OrderedBuffers
from opensmd.modelparallel.runtime.side_effects.random_numbers.torch_generators import default_generators
from opensmd.modelparallel.runtime.tensors.placeholder import RemoteTensor, make_remote, out_of_mapping
from opensmd.modelparallel.runtime.tensors.tags import Tag, put_tag, remove_tag
from opensmd.modelparallel.runtime.trained_parameters import TrainedParameters

__all__ = ["PlacedModel"]


class PlacedModel:
    """Gives every part of a module its home, and frees the memory of what lives elsewhere.

    Args:
        module: the user's module.
        plan: where everything lives.
        rank: this rank of the pipeline.

    Attributes:
        module, plan: as given.
        parameters: all of the model's, including those of other ranks.
        trained: which of them are trained.
        modes: that, and which modules are in training mode, before each step.
        buffers: those of modules that run piece by piece.
        places: where modules keep tensors that change during steps.
        device: where the model computes.
        generators: the random number generators of that device and of the CPU.
        placed_memory: memory of buffers that live on one rank, and of this rank's parameters.
        replicated_memory: memory of buffers that are equal on all ranks (``untyped_storage()._cdata``).
        divided: buffers of several modules on different ranks, each of which has its own copy.
    """

    def __init__(self, module: nn.Module, plan: Plan, rank: int) -> None:
        self.module = module
        self.plan = plan
        self.device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
        self.generators = default_generators(self.device)
        self._rank = rank
        # Including further names of a module that is in several places: the plan may use any of them.
        modules = dict(module.named_modules(remove_duplicate=False))
        self._whole: dict[str, tuple[nn.Module, int]] = {}
        seen: set[nn.Module] = set()
        for name, home in plan.atomic().items():
            # A module with several names is placed and called as one.
            if modules[name] not in seen:
                seen.add(modules[name])
                self._whole[name] = (modules[name], home)
        self._split = {name: modules[name] for name in plan.split()}
        self._sequences = Sequences(self._split, dict(self._whole.values()), rank)
        self.places = Places(module, split=self._split.values())
        self.buffers = OrderedBuffers(self._split)
        self.divided = self._divided_buffers(modules, plan)
        tagged = self._tag_parameters(module, plan)
        self.parameters = [parameter for parameter, _ in tagged]
        self.trained = TrainedParameters(tagged)
        self.modes = self._modes_of(tagged)
        buffers, self.replicated_memory = self._tag_buffers(modules, plan)
        self.placed_memory = buffers | frozenset(
            parameter.untyped_storage()._cdata
            for parameter, tag in tagged
            # Sparse parameters have no storage that views could share.
            if tag.home == rank and parameter.layout is torch.strided
        )

    @property
    def split_modules(self) -> Iterable[nn.Module]:
        """Those that run piece by piece."""
        return self._split.values()

    def require_no_backward_hooks(self) -> None:
        """Raise for a module that runs piece by piece and has full backward hooks.

        Raises:
            SMPUnsupportedError: there is such a module.
        """
        for name, module in self._split.items():
            if has_backward_hooks(module):
                raise SMPUnsupportedError(
                    f"module {name!r} ({type(module).__name__}) is run piece by piece over the partitions "
                    "and has full backward hooks, which would need its inputs and outputs on one rank. "
                    "Register them on its children, use tensor.register_hook, or place it whole with "
                    "smp.set_partition"
                )

    def intercepted(self, *, alone: bool) -> contextlib.AbstractContextManager[None]:
        """During a step, call modules where they live; ``alone``: there is one microbatch."""
        return intercepted(self._whole, self._sequences.forwards(alone=alone), alone=alone)

    def _tag_parameters(self, module: nn.Module, plan: Plan) -> list[tuple[nn.Parameter, Tag]]:
        named = list(module.named_parameters())
        clipping = ClippingWarning(len({plan.parameter_home(name) for name, _ in named}))
        tagged = []
        for name, parameter in named:
            tag = Tag(plan.parameter_home(name), parameter.requires_grad)
            put_tag(parameter, tag)
            tagged.append((parameter, tag))
            # The object stays, because optimizers and hooks of the script refer to it.
            if tag.home != self._rank and not isinstance(parameter, RemoteTensor):
                make_remote(parameter, clipping)
        return tagged

    def _modes_of(self, tagged: list[tuple[nn.Parameter, Tag]]) -> StepModes:
        names = [name for name, _ in self.module.named_parameters()]
        parameters = [
            (name, parameter, tag.home) for name, (parameter, tag) in zip(names, tagged, strict=True)
        ]
        split = [(name, module, self.plan.homes[name]) for name, module in self._split.items()]
        whole = [(name, module, home) for name, (module, home) in self._whole.items()]
        return StepModes(parameters, [*split, *whole])

    def _divided_buffers(self, modules: dict[str, nn.Module], plan: Plan) -> frozenset[Tensor]:
        everywhere = -1
        places: dict[Tensor, set[int]] = {}
        for name, module in modules.items():
            for buffer in module._buffers.values():
                if buffer is not None:
                    place = everywhere if name in self._split else plan.homes[name]
                    places.setdefault(buffer, set()).add(place)
        return frozenset(buffer for buffer, homes in places.items() if len(homes) > 1)

    def _tag_buffers(
        self, modules: dict[str, nn.Module], plan: Plan
    ) -> tuple[frozenset[int], frozenset[int]]:
        """Let buffers live with modules that run as a whole, and everywhere for split modules.

        Returns:
            The memory of the former and of the latter.
        """
        placed, replicated = set(), set()
        moved: dict[Tensor, Tensor] = {}  # buffers of several modules stay shared
        for name, module in modules.items():
            for own, buffer in module._buffers.items():
                if buffer is None:
                    continue
                if name in self._split:
                    remove_tag(buffer)  # of an earlier plan
                    replicated.add(buffer.untyped_storage()._cdata)
                    continue
                home = plan.homes[name]
                # Not in the mapped file: a placeholder must not keep a checkpoint's memory alive.
                if home != self._rank:
                    if buffer not in moved:
                        moved[buffer] = out_of_mapping(buffer)
                    buffer = module._buffers[own] = moved[buffer]
                placed.add(buffer.untyped_storage()._cdata)
                put_tag(buffer, Tag(home))
        return frozenset(placed), frozenset(replicated)
