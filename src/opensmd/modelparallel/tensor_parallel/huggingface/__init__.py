"""Hugging Face models distributed by themselves, and their state dicts in both layouts.

Begin with ``translation``, between the layouts of state dicts. Imports ``transformer``.
"""
