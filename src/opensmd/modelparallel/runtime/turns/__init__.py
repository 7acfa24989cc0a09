"""Which microbatch of a rank runs now, in which thread, and the record of it.

Begin with ``turns.py``, whose docstring draws it. ``rank_schedule.py`` makes the policy that turns ask from
the plan and the settings; ``threads.py`` and ``thread_state.py`` are the threads that further microbatches
need. Imports messages and the pure schedules of planning; knows nothing of calls, tensors and gradients.
"""
