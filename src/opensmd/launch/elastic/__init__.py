"""Replicas that come and go (``--elastic-replicas``): one agent for each, and a store that outlives them.

Begin with ``replica_agents``. Imports ``collectives`` and the launcher's ``stores`` and ``output``.
"""
