"""Messages between the ranks of a pipeline, and where autograd crosses from one to another.

Begin with ``transport.py``: what a message is, and two ways in which it travels; ``hosts.py`` has the third.
``opening.py`` chooses among them. ``edges.py`` and ``graph_edges.py`` draw how gradients come back;
``step_inputs.py`` is what ranks agree on before a step.
Imports tensors, and knows nothing of turns and calls.
"""
