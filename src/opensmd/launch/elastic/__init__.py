"""Replicas that drop out and join (``--elastic-replicas``): one agent each, and a store that outlives them.

Begin with ``replica_agents``. Imports ``collectives`` and the launcher's ``stores`` and ``output``.
"""
