"""The engine: runs a step's microbatches over the ranks of a pipeline without a server.

Every rank runs the user's step function. It executes what lives on it and holds placeholders for the rest.
All ranks pass the same program points in the same order, so sender and receiver of every transfer know about
it without communication. docs/design/pipeline.md explains this in full.

Begin with ``engine.py``: an Engine is opened with a placed model and creates one StepRun per step, which
creates one MicrobatchRun per microbatch. Each file imports only what is below it::

    engine ── step_run ── microbatch_run ── calls/{glue, interception}   what the function does
                                   │                  │
                                   │           calls/call_runner         each call at its home
                                   │                  │
                                   │           calls/transfers           what it needs from elsewhere
                                   │                  │
                                   └──────── backward/backward_pass      where gradients begin, and when
                                                      │
                                                 turns/turns             who runs now
                                                      │
                                       messages/transport, planning/policies

``microbatch.py`` is what these share about one microbatch, ``pipeline_context.py`` what microbatches share,
and ``whole_model.py`` is the engine's counterpart for a single partition. Nothing here knows the user's
objects: settings, plan and replicas come as arguments of the Engine. Imports ``planning``, ``ranks``,
``replicas``, ``offloading``, ``function_modes``, ``redirection``, ``settings`` and ``compatibility``.
"""
