"""Translating state dicts between Hugging Face's layout and that of distributed transformers; pure.

Query, key and value are one parameter ``[3, out, in]`` in a distributed layer; Hugging Face has three, or one
``[in, 3 * out]`` in its Conv1D, whose weights are transposed. Names without a rule do not change.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["Family", "Translations", "from_huggingface", "to_huggingface", "translations_of"]

Translations = tuple[Callable[..., dict[str, Any]], Callable[..., dict[str, Any]]]

QUERY_KEY_VALUE = "attention.query_key_value"
LAYERS = "seq_layers"


@dataclass(frozen=True)
class Family:
    """The names in the models of one architecture.

    Attributes:
        layers: Hugging Face's name of the list of layers.
        modules: a layer's modules, there and here.
        fused: the module with query, key and value, if one has all.
        separate: or the modules of query, key and value.
        conv1d: the modules with transposed weights.
        outside: modules outside the layers, there (below ``body``) and here.
        body: Hugging Face's name of the part under the head; empty for an encoder, which keeps the prefix of
            its layers' name.
        buffers: what old checkpoints have in a layer and current models create themselves.
    """

    layers: str
    modules: Mapping[str, str]
    fused: str | None = None
    separate: tuple[str, str, str] | None = None
    conv1d: frozenset[str] = frozenset()
    outside: Mapping[str, str] = field(default_factory=dict)
    body: str = ""
    buffers: tuple[str, ...] = ()


def translations_of(family: Family) -> Translations:
    """Return the two functions that scripts call: to Hugging Face's names and shapes, and from them."""

    def to_hf(
        state_dict: Mapping[str, Any], max_seq_len: int | None = None, *, has_head: bool | None = None
    ) -> dict[str, Any]:
        """Convert a distributed model's full state dict to Hugging Face's names and shapes.

        Args:
            max_seq_len: accepted and ignored; current models create their causal masks themselves.
            has_head: whether the model has a head, if these are only some entries; None looks for it.
        """
        return to_huggingface(family, state_dict, has_head=has_head)

    def from_hf(state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Convert a Hugging Face model's state dict for a distributed one."""
        return from_huggingface(family, state_dict)

    return to_hf, from_hf


def from_huggingface(family: Family, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a state dict to the distributed layout."""
    translated: dict[str, Any] = {}
    parts: dict[str, dict[int, Any]] = {}
    in_layer = re.compile(rf"(|.*\.){family.layers}\.(\d+)\.(.+)\.(\w+)")
    for name, value in state_dict.items():
        match = in_layer.fullmatch(name)
        if match is None:
            translated[_outside_here(family, name)] = value
            continue
        prefix, number, module, kind = match.groups()
        if f"{module}.{kind}" in family.buffers:
            continue
        place = f"{_prefix_here(family, prefix)}{LAYERS}.{number}."
        whole = f"{place}{QUERY_KEY_VALUE}.{kind}"
        if module == family.fused:
            turned = _turned(family, module, kind, value)
            translated[whole] = turned.reshape(3, turned.shape[0] // 3, *turned.shape[1:])
        elif family.separate is not None and module in family.separate:
            separate = parts.setdefault(whole, {})
            separate[family.separate.index(module)] = value
            if len(separate) == 3:
                translated[whole] = torch.stack([separate[index] for index in range(3)])
        elif module in family.modules:
            translated[f"{place}{family.modules[module]}.{kind}"] = _turned(family, module, kind, value)
        else:
            translated[name] = value
    return translated


def to_huggingface(
    family: Family, state_dict: Mapping[str, Any], *, has_head: bool | None = None
) -> dict[str, Any]:
    """Convert a state dict to Hugging Face's names.

    Args:
        has_head: whether the model has a head, if these are only some entries; None looks for it in them.
    """
    translated: dict[str, Any] = {}
    there = {here: module for module, here in family.modules.items()}
    if has_head is None:
        has_head = any(name.startswith("lm_head.") for name in state_dict)
    body = family.body if has_head else ""
    in_layer = re.compile(rf"(|.*\.){LAYERS}\.(\d+)\.(.+)\.(\w+)")
    for name, value in state_dict.items():
        match = in_layer.fullmatch(name)
        if match is None:
            translated[_outside_there(family, body, name)] = value
            continue
        prefix, number, module, kind = match.groups()
        place = f"{body if family.body else prefix}{family.layers}.{number}."
        if module == QUERY_KEY_VALUE and family.fused is not None:
            turned = _turned(family, family.fused, kind, value.flatten(0, 1))
            translated[f"{place}{family.fused}.{kind}"] = turned.contiguous()
        elif module == QUERY_KEY_VALUE:
            assert family.separate is not None
            for part, own in zip(family.separate, value.unbind(0), strict=True):
                translated[f"{place}{part}.{kind}"] = own.contiguous()
        elif module in there:
            turned = _turned(family, there[module], kind, value)
            translated[f"{place}{there[module]}.{kind}"] = turned.contiguous()
        else:
            translated[name] = value
    return translated


def _turned(family: Family, module: str, kind: str, value: Any) -> Any:
    """Transpose a tensor of ``module`` if it is a Conv1D's weight, which one of the libraries transposes."""
    return value.t() if kind == "weight" and module in family.conv1d else value


def _prefix_here(family: Family, prefix: str) -> str:
    """Return the prefix of ``seq_layers``: a language model's transformer, or what is around an encoder."""
    return "transformer." if family.body else prefix


def _outside_here(family: Family, name: str) -> str:
    module, _, kind = name.removeprefix(family.body).rpartition(".")
    return f"{family.outside[module]}.{kind}" if module in family.outside else name


def _outside_there(family: Family, body: str, name: str) -> str:
    module, _, kind = name.rpartition(".")
    there = {here: key for key, here in family.outside.items()}
    return f"{body}{there[module]}.{kind}" if module in there else name
