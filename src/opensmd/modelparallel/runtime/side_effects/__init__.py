"""What calls and microbatches leave behind besides results: attributes, buffers, containers, random numbers.

Four questions are answered here, in files that build on ``slots.py`` (what a module holds), ``containers.py``
(what is in a list or dict) and ``written.py`` (which arguments a call writes to):

- What has one call changed? ``watch.py`` watches it at its home; ``effects.py`` finds the changes there and
  repeats them on the other ranks.
- What does each microbatch see, although they take turns? ``per_microbatch.py`` swaps its state in and out:
  ``attributes.py``, ``contents.py``, ``parametrizations.py``, ``random_numbers``. What each one resets is
  found by ``transient.py``. What passes from one to the next, in ``buffers.py``, keeps their order instead.
- Which tensors have left a module other than in its result? ``escaped.py`` handles those that only one rank
  has, ``escaped_from_checkpoints.py`` those whose graph ends there.
- What does a checkpointed function see when backward runs it again? ``repeated.py``.

Begin with ``slots.py``. From the runtime, imports the descriptions of calls and tensors, and turns; the step
and its microbatches import this.
"""
