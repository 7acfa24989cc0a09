"""Has Python's collector rest in this process from its import on.

The fork server imports this first: what it imports next lives as long as the server, and looking through it
again and again for garbage takes a fifth of the time. Its forks collect again.
"""

from __future__ import annotations

import gc

__all__: list[str] = []

gc.disable()
