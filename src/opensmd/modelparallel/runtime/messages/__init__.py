"""Messages between the ranks of a pipeline, and where autograd crosses from one to another.

Begin with ``message.py``, what identifies a message, and ``transport.py``, the interface for sending. Three
files implement it (``mailbox_transport.py``, ``hosts_transport.py``, ``group_transport.py``), and
``opening.py`` chooses among them; ``outbox.py`` keeps what is being sent. ``edges.py`` and ``graph_edges.py``
draw how gradients come back; ``step_inputs.py`` is what ranks agree on before a step. Imports tensors, and
knows nothing about turns and calls.
"""
