"""Replicas that drop out of a job and come back to it while the others keep training.

Begin with ``elastic_job``, which carries out every step: if a replica is lost, the others recreate their
groups without it and repeat the step. ``membership`` is pure and decides who continues; ``agreement`` applies
it in the job's store; ``job_groups`` creates the groups; ``kept`` restores what a step had changed;
``regrouped_model`` is the model between two sets of groups; ``join_requests`` looks for replicas that want to
join, ``steps`` is the border at which they do, and ``joining`` sends them their state. Imports
``checkpoint``, ``dry_run``, ``planning``, ``ranks``, ``replan``, ``replicas``, ``report``, ``runtime``,
``settings``, ``sharding``, ``state_dicts`` and the state.
"""
