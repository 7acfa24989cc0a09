"""Every model of the zoo by its name, "library: model"."""

from __future__ import annotations

from tests.zoo import others, pictures, transformers_zoo, words
from tests.zoo.model import Model
from tests.zoo.torchvision_operators import declare_operators

__all__ = ["LIBRARIES", "find", "names"]

declare_operators()

_MADE = {**others.MODELS, **words.MODELS, **pictures.MODELS}

LIBRARIES = ("transformers", *sorted(_MADE))


def names(library: str) -> list[str]:
    """The names of a library's models."""
    models = transformers_zoo.candidates() if library == "transformers" else _MADE[library]
    return [f"{library}: {model}" for model in models]


def find(name: str) -> Model:
    """The model of this name."""
    library, _, model = name.partition(": ")
    return transformers_zoo.make(model) if library == "transformers" else _MADE[library][model]()
