"""What forwards reach outside of a model's modules: caches, collectors, contexts, globals, classes, closures.

``held.py`` reads and sets what one of them holds, ``classes.py`` what a class does; ``reach.py`` finds
objects, ``code.py`` says which globals, classes and closures the code of modules uses. ``registry.py`` keeps
those of a model; ``places.py`` names those of one call for other ranks; ``elsewhere.py`` says in which of
them a tensor without data was. Begin with ``reach.py``. Imports containers, slots and placeholders; the rest
of ``side_effects`` imports this.
"""
