"""State dicts of a split model, merged from its stages and taken apart again.

``ModelState``, the base of ``smp.DistributedModel``, derives from ``Moves``, ``StateDicts`` and
``Whereabouts``, each in its own file. ``gather`` merges the parts of ranks, and ``merge`` those of files.

Begin with ``whereabouts``. Imports ``planning``, ``precision``, ``ranks``, ``runtime.tensors``,
``compatibility``, ``redirection``, ``delayed`` and ``tensor_parallel``; files on disk are the business of
``checkpoint``, which imports this.
"""
