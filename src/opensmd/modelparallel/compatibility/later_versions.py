"""Names of later versions of the library that do not exist here: using one raises an error that says so.

Scripts may still import them; nothing is silently absent.
"""

from __future__ import annotations

from typing import Any, NoReturn

from opensmd.modelparallel.exceptions import SMPUnsupportedError

__all__ = ["dump_model", "verify"]

TEST_HELPER = (
    "this helper of the original library's own tests was never documented and does not exist here; compare "
    "model.state_dict() and optimizer.state_dict(), which are whole on every rank"
)


def verify(*args: Any, **kwargs: Any) -> NoReturn:
    """Raise SMPUnsupportedError."""
    raise SMPUnsupportedError(f"smdistributed.modelparallel.test.torch.utils.verify: {TEST_HELPER}")


def dump_model(*args: Any, **kwargs: Any) -> NoReturn:
    """Raise SMPUnsupportedError."""
    raise SMPUnsupportedError(f"smdistributed.modelparallel.test.torch.utils.dump_model: {TEST_HELPER}")
