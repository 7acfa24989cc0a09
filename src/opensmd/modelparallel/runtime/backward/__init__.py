"""Where a backward starts, when it runs, and separately computed weight gradients.

Begin with ``backward_pass.py``, whose docstring draws the paths of a backward. A *deferred* backward
(``deferred.py``) runs later as a whole, when its gradient has arrived. *Weight gradients*
(``weight_gradients.py``) are the second part of a backward whose first part has run. Imports turns, messages
and tensors; knows nothing about calls.
"""
