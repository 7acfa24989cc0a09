"""What calls return and change: described at their homes, and learned by the ranks that hold placeholders.

Begin with ``description.py``, what travels. ``describing.py`` creates it at a call's home, ``exchange.py``
sends and receives it, and ``known_calls.py`` keeps what was learned from step to step. From the runtime,
imports tensors; the exchange also imports transfers and messages.
"""
