"""What a dry run can tell about time beyond shapes: clocks, signs of unseen work, and replays.

Begin with ``step_clock``, which times a step, and ``replay``, which runs the operations of one again, as
they are in a ``step_record``. ``unseen_work`` finds work that shapes do not show, and ``stopwatch`` measures
time without waits for a busy core. ``stage_links`` gives the cost of messages between stages, depending on
where their ranks are. Imports ``planning``, ``ranks``, ``config``, and the runtime's tensors.
"""
