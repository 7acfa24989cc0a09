"""The dry run before the first step: the step function runs without data, to show the planner the model.

``capture`` runs it, ``observing`` records what happens, and ``first_plan`` makes the plan on the first rank
and announces it to the others.

Begin with ``capture``; ``automatic`` chooses for ``smp.init``. Imports ``planning``, ``report``, ``ranks``,
``compatibility``, ``redirection``, ``settings``, torch's autocast cache from ``precision``, and from
``runtime`` the descriptions of tensors, calls and side effects, never what runs steps.
"""
