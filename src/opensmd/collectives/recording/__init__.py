"""Recording collectives and messages for a timeline, if one is wanted.

Imports ``timeline``, ``native`` and ``environment``. Begin with ``begin``, which runs when the first group is
created; ``core_events`` passes on what the core records.
"""
