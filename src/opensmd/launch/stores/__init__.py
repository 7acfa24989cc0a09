"""The agents' stores: where they listen, and whom they believe. Begin with ``rendezvous``.

Imports ``collectives`` and ``environment``.
"""
