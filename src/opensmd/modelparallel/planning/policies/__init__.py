"""Which microbatch a rank works on next: pure, states and arrivals in, a choice out.

Begin with ``policy.py``, what every policy is asked and answers. ``table_order.py`` follows a table of
:mod:`..schedules`, ``fixed_order.py`` waits in place. ``limits.py`` says how many microbatches may be under
way at once, ``patience.py`` how long what is late is waited for. Imports the tables, and nothing else.
"""
