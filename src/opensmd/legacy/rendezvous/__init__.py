"""How the processes of a job find each other: one file per method, and one protocol for all.

Every method ends with a torch ``Store`` that all processes can reach: ``tcp`` is told where it is, ``env``
reads that from the environment, ``file`` and ``multicast`` find out. The rest is the same for all
(:mod:`.rendezvous`): each process takes an arrival index in the store, ranks are assigned, and everyone
learns of every failure.

Begin with ``rendezvous``. Imports ``collectives`` and ``environment``; the transports import this.
"""
