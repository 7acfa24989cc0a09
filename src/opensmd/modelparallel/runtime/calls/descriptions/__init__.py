"""What calls return and change: described at their homes, and learned by the ranks that hold placeholders.

Begin with ``description.py``, what travels. ``describing.py`` makes it at a call's home, ``exchange.py``
sends it and receives it, and ``known_calls.py`` keeps what was learned from step to step. Imports of the
runtime what describes tensors; the exchange also transfers and their messages.
"""
