"""Creating a process group: its members say where they run, and then their backend is created.

Begin with ``group``. Imports ``collectives``' stores, hosts and recording, ``native`` and ``environment``.
"""
