"""Hugging Face models that are distributed automatically, and their state dicts in both layouts.

Begin with ``translation``, between the layouts of state dicts. Imports ``transformer``.
"""
