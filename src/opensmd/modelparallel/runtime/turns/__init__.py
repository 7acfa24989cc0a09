"""Which microbatch of a rank runs now, in which thread, and the record of it.

Begin with ``turns.py``, whose docstring draws it; ``candidates.py`` chooses who is next. ``rank_schedule.py``
makes the policy from the plan and the settings, and ``adaptive_schedule.py`` adapts it to measured times;
``threads.py`` and ``thread_state.py`` are the threads that further microbatches need. Imports messages and
the pure policies of planning; knows nothing about calls, tensors and gradients.
"""
