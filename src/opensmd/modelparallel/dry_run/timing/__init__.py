"""What a dry run can say about time beyond what shapes say: clocks, signs of unseen work, and trials.

Begin with ``operation_trials``: operations of the run by themselves. ``unseen_work`` says where shapes
cannot tell, and ``stopwatch`` tells time without the waits for a busy core. ``stage_links`` says what
messages between stages take, by where their ranks are. Imports ``planning``, ``ranks``, ``config``, and of
the ``runtime`` what describes tensors.
"""
