"""What a timeline shows of collectives and messages, in a process that is to leave one.

Imports ``timeline``, ``native`` and ``environment``. Begin with ``begin``, which runs when the first group is
made; ``core_events`` hands over what the core notes.
"""
