"""The stores in which ranks meet: where they listen, calls to them that end in time, one after another.

Begin with ``in_turn``. Imports nothing else of the package.
"""
