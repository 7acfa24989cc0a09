"""The stores in which ranks meet: where they listen, time limits for calls, and consecutive stores.

Begin with ``in_turn``. Imports nothing else of the package.
"""
