"""How bytes move between ranks: the smddp process group of torch.distributed.

``opensmd.collectives.backend.register()`` registers it, as importing
``smdistributed.dataparallel.torch.torch_smddp`` does. This file imports nothing, so that
``python -m opensmd.native.build`` can run alone.

Begin with ``backend``, whose groups ``making`` makes. Imports ``native``, ``timeline`` and ``environment``;
everything above may import this.
"""
