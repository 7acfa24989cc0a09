"""What a backward begins with, when it runs, and gradients of weights that are computed apart.

Begin with ``backward_pass.py``, whose docstring draws the ways that a backward may take. A *deferred*
backward (``deferred.py``) runs later as a whole, when its gradient has come. *Weight gradients*
(``weight_gradients.py``) are the second part of a backward whose first part has run. Imports turns,
messages and tensors; knows nothing of calls.
"""
