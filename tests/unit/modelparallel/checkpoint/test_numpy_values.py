"""The stand-ins that read NumPy's part of a file first: all that NumPy writes passes, and nothing else."""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np
import pytest

from opensmd.modelparallel.checkpoint.numpy_values import checking_globals


class Checking(pickle.Unpickler):
    """Reads with the stand-ins alone."""

    def find_class(self, module: str, name: str) -> Any:
        """What stands for a name."""
        return {key: value for value, key in checking_globals()}[f"{module}.{name}"]


def check(data: bytes) -> None:
    Checking(io.BytesIO(data)).load()


VALUES = [
    np.float64(1.5),
    np.int8(3),
    np.bool_(True),
    np.str_("abc"),
    np.datetime64("2024-01-01"),
    np.arange(6).reshape(2, 3),
    np.zeros((0, 4), dtype=np.float16),
    np.array(["a", "bc"]),
    np.array([1, "x", None], dtype=object),
    np.array([1, 2], dtype=">i4"),
    np.array([np.timedelta64(5, "ms")]),
    np.asfortranarray(np.ones((2, 2))),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_what_numpy_writes_passes(value: Any) -> None:
    check(pickle.dumps(value, protocol=3))


class Forged:
    """Pickles as a call of NumPy's functions with arguments of its own, and a state."""

    def __init__(self, *reduced: Any) -> None:
        self.reduced = reduced

    def __reduce__(self) -> Any:
        return self.reduced


RECONSTRUCT, BEGIN, STATE = np.zeros(1).__reduce__()
INT8 = np.dtype("i1")


@pytest.mark.parametrize(
    ("forged", "said"),
    [
        (Forged(RECONSTRUCT, BEGIN, (1, (2,), INT8, False, b"a")), "does not fit its shape"),
        (Forged(RECONSTRUCT, BEGIN, (1, (-1,), INT8, False, b"a")), "a state that is not NumPy's"),
        (Forged(RECONSTRUCT, BEGIN, (1, (1,), INT8, False)), "a state that is not NumPy's"),
        (Forged(RECONSTRUCT, BEGIN, (1, (1,), "i1", False, b"a")), "without a dtype"),
        (Forged(RECONSTRUCT, (np.ndarray, (3,), b"b")), "does not begin as NumPy's do"),
        (Forged(np.ndarray, ((4,),)), "which NumPy never writes"),
        (Forged(np.dtype, ("V8", False, True)), "not simple"),
        (Forged(np.dtype, ("i3", False, True)), "does not know"),
        (
            Forged(np.dtype, ("O8", False, True), (3, "|", None, None, None, -1, -1, 0)),
            "a state that is not its own",
        ),
        (Forged(np.float64(0).__reduce__()[0], (np.dtype("O"), b"\0" * 8)), "a scalar of objects"),
    ],
)
def test_what_numpy_would_not_have_written_is_refused(forged: Forged, said: str) -> None:
    with pytest.raises(pickle.UnpicklingError, match=said):
        check(pickle.dumps(forged, protocol=3))
