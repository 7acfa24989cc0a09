"""Ordinary objects that forwards reach from a model's modules: caches, collectors, contexts, globals.

``held.py`` reads and sets what one of them holds, ``reach.py`` finds them, ``code.py`` says which globals the
code of modules uses. ``registry.py`` keeps those of a model; ``places.py`` names those of one call for other
ranks; ``elsewhere.py`` says in which of them a tensor without data was. Begin with ``reach.py``. Imports
containers, slots and placeholders; the rest of ``side_effects`` imports this.
"""
