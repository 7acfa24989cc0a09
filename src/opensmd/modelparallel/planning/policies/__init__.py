"""Which microbatch a rank works on next: states and arrivals in, a choice out; pure.

Begin with ``policy.py``, the interface of all policies. ``table_order.py`` follows a table of
:mod:`..schedules`, ``fixed_order.py`` waits in place. ``limits.py`` says how many microbatches may be in
flight, and ``patience.py`` how long to wait for something late. Imports only the tables.
"""
