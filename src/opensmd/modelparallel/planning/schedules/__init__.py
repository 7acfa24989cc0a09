"""Schedules as tables: what each rank of a pipeline does in which order, as pure functions.

Begin with ``tables.py``: an action is a forward, a backward or the weight gradients of one microbatch in one
chunk of a rank. Each further file makes the tables of one idea; ``playing.py`` computes how long a table
takes and what it keeps in memory. Nothing here knows tensors, ranks or settings, and nothing else is
imported.

These tables are ideals. A policy (:mod:`..policies`) takes a rank's row as its order of preference and adapts
to what arrives, because a program may call its parts in any order.
"""
