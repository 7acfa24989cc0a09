"""Which microbatch of a rank runs now, in which thread, and the record of it.

Begin with ``turns.py``, whose docstring draws it; ``candidates.py`` is the choice of who is next.
``rank_schedule.py`` makes the policy that chooses from the plan and the settings, which
``adaptive_schedule.py`` lets follow what steps have taken; ``threads.py`` and
``thread_state.py`` are the threads that further microbatches need. Imports messages and the pure policies of
planning; knows nothing of calls, tensors and gradients.
"""
