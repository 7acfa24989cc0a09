"""Hugging Face models distributed by themselves, and their state dicts in both layouts."""
