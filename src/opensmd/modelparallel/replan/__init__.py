"""Another plan for a running job: whether the first one was right, and switching to a better one.

Begin with ``plan_check``, which compares the first steps with the plan; ``moving`` sends parts of the model
to their new homes. Imports ``planning``, ``dry_run``, ``ranks``, ``replicas``, ``report``, ``runtime``,
``settings``, ``state_dicts`` and the state.
"""
