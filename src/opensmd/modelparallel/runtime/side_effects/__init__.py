"""What calls and microbatches leave behind besides results: attributes, buffers, containers, random numbers.

Four questions are answered here, each in files that build on ``slots.py`` (what a module holds),
``containers.py`` (what is in a list or dict) and ``written.py`` (which arguments a call writes into):

- What has one call changed? ``watch.py`` looks around it at its home, ``effects.py`` finds it there and does
  the same on the other ranks.
- What does each microbatch find, though they take turns? ``per_microbatch.py`` swaps its state in and out:
  ``attributes.py``, ``contents.py``, ``parametrizations.py``, ``random_numbers``. What goes on from one to
  the next, in ``buffers.py``, keeps their order instead.
- Which tensors have left a module by another way than its result? ``escaped.py`` for those that one rank
  alone has, ``escaped_from_checkpoints.py`` for those that end their graph there.
- What does a checkpointed function find when backward runs it again? ``repeated.py``.

Begin with ``slots.py``. Imports of the runtime what describes calls and tensors, and follows turns; the
step and its microbatches import this.
"""
