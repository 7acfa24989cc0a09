"""Messages between the ranks of a pipeline, and where autograd crosses from one to another.

Begin with ``message.py``, what a message is known by, and ``transport.py``, what ranks can do with it. Three
files each have one way in which messages travel (``mailbox_transport.py``, ``hosts_transport.py``,
``group_transport.py``), and ``opening.py`` chooses among them; ``outbox.py`` keeps what is being sent.
``edges.py`` and ``graph_edges.py`` draw how gradients come back; ``step_inputs.py`` is what ranks agree on
before a step. Imports tensors, and knows nothing of turns and calls.
"""
