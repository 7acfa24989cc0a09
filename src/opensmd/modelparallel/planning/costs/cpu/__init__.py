"""The time of operations on one CPU core. Pure: shapes go in, seconds come out.

Begin with ``rates``, the table; ``kinds`` classifies operations, and ``cost`` adds up. Imports no other
folder.
"""
