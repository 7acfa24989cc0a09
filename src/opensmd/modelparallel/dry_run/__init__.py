"""Before the first step: the step function runs once without data, to show the planner what the model is.

``capture`` runs it, ``observing`` writes down what happens, ``first_plan`` makes the plan of it on the first
rank and announces it to the others.

Begin with ``capture``; ``automatic`` chooses for ``smp.init``. Imports ``planning``, ``report``, ``ranks``,
``compatibility``, ``redirection``, ``settings``, of ``precision`` what torch keeps of autocast, and of the
``runtime`` what describes tensors, calls and side effects, never what runs steps.
"""
