"""Calls of modules and functions: intercepted, keyed, run at their homes, described to other ranks.

Begin with ``glue.py``, which intercepts every operation of the step function, and ``interception.py``, for
modules and what function modes do not see; both pass a ``Call`` to the microbatch's ``CallRunner``.
``transfers.py`` brings a call's tensors to its home, and ``descriptions`` tell the others about its result.
Imports everything in the runtime except what makes steps (``engine``, ``step_run``, ``microbatch_run``).
"""
