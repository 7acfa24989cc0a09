"""Ordinary objects that forwards reach from a model's modules: caches, collectors, contexts, globals.

``held.py`` reads and sets what one of them holds, ``reach.py`` finds them, ``code.py`` says which globals the
code of modules uses. ``registry.py`` keeps those of a model; ``places.py`` names those of one call for other
ranks. Begin with ``reach.py``. Imports containers and slots; the rest of ``side_effects`` imports this.
"""
