"""Calls of modules and functions: intercepted, keyed, and their results described to other ranks."""
