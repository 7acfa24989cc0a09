"""How a process group is made: its members say where they run, and what is to serve them is made.

Begin with ``group``. Imports ``collectives``' stores, hosts and recording, ``native`` and ``environment``.
"""
