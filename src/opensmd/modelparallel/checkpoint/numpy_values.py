"""NumPy values in untrusted files.

NumPy's own unpickling believes what it reads: if a dtype of objects claims to have none, it follows pointers
from the file. So a file with such values is read twice. The first time, the classes here replace NumPy's;
they make no arrays, and refuse every state that NumPy itself would not have written. Then NumPy reads what
has passed. Structured and void dtypes are refused.
"""

from __future__ import annotations

import math
import pickle
import re
from typing import Any

import numpy as np

__all__ = ["checking_globals", "numpy_globals"]

_SIMPLE = re.compile(r"b1|[iufc]\d{1,2}|[US]\d{1,9}|[mM]8|O8?")
_CODES = "?bBhHiIlLqQefdgFDGUSmMO"  # one per class of simple dtypes
_PLACES = ("numpy._core.multiarray", "numpy.core.multiarray")  # since NumPy 2, and before


def numpy_globals() -> tuple[Any, ...]:
    """Return the globals that pickles of NumPy's scalars, arrays and dtypes name, in torch's form."""
    functions: list[Any] = [np.float64(0).__reduce__()[0], np.zeros(1).__reduce__()[0]]
    named = [(function, f"{place}.{function.__name__}") for function in functions for place in _PLACES]
    dtypes = [type(np.dtype(name)) for name in _CODES]
    return (*named, np.ndarray, np.dtype, *dtypes)


def checking_globals() -> tuple[Any, ...]:
    """Return what replaces these names while a file is checked."""
    checks = [(_scalar, f"{place}.scalar") for place in _PLACES]
    arrays = [(_Array, f"{place}._reconstruct") for place in _PLACES]
    return (*checks, *arrays, (_Dtype, "numpy.dtype"), (_ArrayType, "numpy.ndarray"))


class _ArrayType:
    """Replaces ``numpy.ndarray``, which is only ever named, as the type of an array."""

    def __new__(cls, *_: object) -> _ArrayType:
        """Refuse every value."""
        raise pickle.UnpicklingError("a call of numpy.ndarray, which NumPy never writes")


class _Dtype:
    """Replaces a dtype, and knows the real one that a file written by NumPy would make."""

    true: np.dtype[Any]

    def __new__(cls, code: object, align: object, copy: object) -> _Dtype:
        """Called by both of pickle's ways to create objects; a dtype that is not a copy is shared by all."""
        if not isinstance(code, str) or _SIMPLE.fullmatch(code) is None or (align, copy) != (False, True):
            raise pickle.UnpicklingError(f"a dtype {code!r:.40} that is not simple")
        dtype = super().__new__(cls)
        try:
            dtype.true = np.dtype(code)
        except TypeError as error:
            raise pickle.UnpicklingError(f"a dtype {code!r:.40} that NumPy does not know") from error
        return dtype

    def __setstate__(self, state: object) -> None:
        expected = self.true.__reduce__()[2]
        if not isinstance(state, tuple) or len(state) != len(expected) or state[1] not in ("<", ">", "|"):
            raise pickle.UnpicklingError("a dtype with a state that is not NumPy's")
        # version 3 of the state, or 4 with a time unit; the byte order may be another machine's
        if (state[0], *state[2:8]) != (expected[0], *expected[2:8]):
            raise pickle.UnpicklingError("a dtype with a state that is not its own")
        if len(expected) == 9 and not _is_unit(state[8]):
            raise pickle.UnpicklingError("a dtype of times with a unit that is not NumPy's")


class _Array:
    """Replaces an array."""

    def __new__(cls, kind: object, shape: object, code: object) -> _Array:
        """Called by both of pickle's ways to create objects."""
        if kind is not _ArrayType or shape != (0,) or code != b"b":
            raise pickle.UnpicklingError("an array that does not begin as NumPy's do")
        return super().__new__(cls)

    def __setstate__(self, state: object) -> None:
        if not isinstance(state, tuple) or len(state) != 5:
            raise pickle.UnpicklingError("an array with a state that is not NumPy's")
        version, shape, dtype, is_fortran, data = state
        if version != 1 or not isinstance(is_fortran, bool) or not _is_shape(shape):
            raise pickle.UnpicklingError("an array with a state that is not NumPy's")
        _check_data(dtype, data, math.prod(shape))


def _scalar(dtype: object, data: object = None) -> None:
    """Replaces a scalar."""
    if isinstance(dtype, _Dtype) and dtype.true.hasobject:
        raise pickle.UnpicklingError("a scalar of objects")
    _check_data(dtype, data, 1)


def _check_data(dtype: object, data: object, count: int) -> None:
    if not isinstance(dtype, _Dtype):
        raise pickle.UnpicklingError("data of NumPy without a dtype")
    if dtype.true.hasobject:
        fits = type(data) is list and len(data) == count
    else:
        fits = type(data) is bytes and len(data) == count * dtype.true.itemsize
    if not fits:
        raise pickle.UnpicklingError(f"data of NumPy that does not fit its shape and dtype {dtype.true}")


def _is_shape(shape: object) -> bool:
    return isinstance(shape, tuple) and all(type(size) is int and 0 <= size < 1 << 48 for size in shape)


def _is_unit(metadata: object) -> bool:
    if not isinstance(metadata, tuple) or len(metadata) != 2 or metadata[0] not in (None, {}):
        return False
    unit = metadata[1]
    return (
        isinstance(unit, tuple)
        and len(unit) == 4
        and unit[0] in (b"generic", *b"Y M W D h m s ms us ns ps fs as".split(), "μs".encode())
        and all(type(number) is int and 0 < number < 1 << 31 for number in unit[1:])
    )
