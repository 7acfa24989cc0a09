"""Another plan for a job that runs: whether the first one was right, and moving to a better one.

Begin with ``plan_check``, which compares the first steps with the plan; ``moving`` sends parts of the model
to where they live from then on. Imports ``planning``, ``dry_run``, ``ranks``, ``replicas``, ``report``,
``runtime``, ``settings``, ``state_dicts`` and the state.
"""
