"""The time of operations, from shapes alone. Pure.

Begin with ``cost``, which chooses the device: ``cpu`` has a table of rates, and ``gpu`` a few. Imports no
other folder.
"""
