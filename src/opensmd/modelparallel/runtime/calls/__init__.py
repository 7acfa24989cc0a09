"""Calls of modules and functions: intercepted, keyed, run at their homes, described to other ranks.

Begin with ``glue.py``, through which every operation of the step function comes, and ``interception.py``,
for modules and what function modes do not see; both hand a ``Call`` to the microbatch's ``CallRunner``.
``transfers.py`` brings a call's tensors to its home, ``descriptions`` is what the others learn of its
result. Imports everything of the runtime but what makes steps (``engine``, ``step_run``,
``microbatch_run``).
"""
