"""State dicts of a split model, put together from its stages and taken apart again.

``ModelState`` is the base of ``smp.DistributedModel`` and stands on ``Moves``, ``StateDicts`` and
``Whereabouts``, each in its file. Begin with ``whereabouts``. Imports ``planning``, ``ranks`` and
the runtime's tensors; files on disk are ``checkpoint``'s.
"""
