"""The agents' stores: where they listen, and whom they trust. Begin with ``rendezvous``.

Imports ``collectives`` and ``environment``.
"""
