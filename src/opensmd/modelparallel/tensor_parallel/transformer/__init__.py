"""The distributed transformer: attention, output, layer, stack and language model, outermost last.

Begin with ``attention``, the innermost. Imports ``layers`` and the parent folder.
"""
