"""The ``smd`` command: what a user asks about a machine or a model without training on it.

Begin with ``cli``. Imports any package; none imports this.
"""
