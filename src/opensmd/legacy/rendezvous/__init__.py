"""How the processes of a job find each other: one file a method, one protocol for all.

Every method ends with a torch ``Store`` that all processes reach: ``tcp`` is told where it is, ``env`` reads
that from the environment, ``file`` and ``multicast`` find out. What happens then is the same for all
(:mod:`.rendezvous`): each process takes an arrival index in the store, ranks are given, everyone hears of
every failure.

Begin with ``rendezvous``. Imports ``collectives`` and ``environment``; the transports import this.
"""
