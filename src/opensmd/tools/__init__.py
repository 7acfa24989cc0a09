"""The ``smd`` command: answers about a machine or a model without training.

Begin with ``cli``. Imports any package; none imports this.
"""
