"""Replicas that drop out of a job and come back to it while the others train on.

Begin with ``elastic_job``, which carries out every step: if a replica is lost in it, the others make their
groups anew without it and do the step again. ``membership`` is pure and says who goes on; ``agreement`` asks
for it in the job's store; ``job_groups`` makes the groups; ``kept`` puts back what a step had changed;
``regrouped_model`` is the model between two sets of groups; ``join_requests`` looks for replicas that come,
``steps`` is the border at which they join and ``joining`` sends them their state. Imports ``checkpoint``,
``dry_run``, ``planning``, ``ranks``, ``replan``, ``replicas``, ``report``, ``runtime``, ``settings``,
``sharding``, ``state_dicts`` and the state.
"""
