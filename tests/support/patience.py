"""How long tests wait for what will come.

A machine that is busy with something else is no fault, so it is long: whatever takes longer hangs. Only a
test in which a wait must expire has a short time of its own, which begins when all is ready.
"""

__all__ = ["PATIENCE"]

PATIENCE = 240.0  # seconds; pytest's own timeout, in pyproject.toml, is a little longer
