"""What a timeline shows of collectives and messages, in a process that is to leave one.

Imports ``timeline``, ``native`` and ``environment``. Begin with ``begin``, which runs when the first group is
made; ``flight_records`` reads what the core keeps in shared memory, ``logged_calls`` what it notes of all
other groups.
"""
