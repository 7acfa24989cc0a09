"""State dicts of a split model, put together from its stages and taken apart again.

``ModelState`` is the base of ``smp.DistributedModel`` and stands on ``Moves``, ``StateDicts`` and
``Whereabouts``, each in its file. ``gather`` and ``merge`` put parts together: over ranks, and of files.

Begin with ``whereabouts``. Imports ``planning``, ``precision``, ``ranks``, ``runtime.tensors``,
``compatibility``, ``redirection``, ``delayed`` and ``tensor_parallel``; files on disk are those of
``checkpoint``, which imports this.
"""
