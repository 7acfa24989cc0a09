"""What is on the list of harmless types, and how a refusal is named."""

from __future__ import annotations

import argparse
import collections
import datetime
import fractions
import io
import pathlib
import pickle
from typing import Any

import pytest
import torch

from opensmd.modelparallel.checkpoint.trusted import is_trusted, load_without_trust, refused_name


def file_with(value: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


@pytest.mark.parametrize("kind", [argparse.Namespace, datetime.date, pathlib.PosixPath, frozenset, slice])
def test_plain_values_and_paths_are_trusted(kind: type) -> None:
    assert is_trusted(kind)


def test_a_subclass_may_do_anything_and_is_not_trusted() -> None:
    class Mine(argparse.Namespace):
        pass

    assert not is_trusted(Mine) and not is_trusted(fractions.Fraction) and not is_trusted(collections.deque)


def test_a_configuration_is_one_by_its_class_and_not_by_the_name_of_its_module() -> None:
    from transformers import GPT2Config

    disguised = type("GPT2Config", (), {"__module__": GPT2Config.__module__})
    assert is_trusted(GPT2Config) and not is_trusted(disguised)


def test_values_of_the_list_load_where_torch_alone_refuses() -> None:
    value = {"options": argparse.Namespace(lr=0.1), "at": datetime.date(2024, 1, 2)}
    with pytest.raises(pickle.UnpicklingError):
        torch.load(file_with(value), weights_only=True)
    assert load_without_trust(file_with(value)) == value


def test_what_is_refused_is_named_and_other_errors_name_nothing() -> None:
    with pytest.raises(pickle.UnpicklingError) as refused:
        load_without_trust(file_with(fractions.Fraction(1, 3)))
    assert refused_name(refused.value) == "fractions.Fraction"
    assert refused_name(RuntimeError("the disk is gone")) is None


def test_loading_leaves_no_type_allowed_behind() -> None:
    before = set(torch.serialization.get_safe_globals())  # in no order
    load_without_trust(file_with(frozenset({1})))
    assert set(torch.serialization.get_safe_globals()) == before
