"""Model parallelism for any ``nn.Module``; scripts import it as ``smdistributed.modelparallel.torch``.

Every rank of a pipeline group runs the user's step function, but executes only the modules it holds.

The modules here are what users hold (``init``, ``step``, ``model``, ...). ``planning`` is pure, ``dry_run``
feeds it, ``runtime`` runs steps by its plan, ``replicas`` reduces gradients, ``state_dicts`` and
``checkpoint`` assemble a split model and take it apart, ``ranks`` is the grid. Begin with ``step``.
"""

from opensmd.tested_torch import warn_if_untested

warn_if_untested()

# The last version of the documented interface; scripts look at it. From 1.10 on, Hugging Face's Trainer saves
# and resumes with save_checkpoint and resume_from_checkpoint, which work here.
INTERFACE_VERSION = "1.15.0"

__all__ = ["INTERFACE_VERSION"]
