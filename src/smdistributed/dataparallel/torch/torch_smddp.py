"""Importing this module makes ``init_process_group("smddp")`` work; it has no other use."""

from opensmd.collectives.backend import register

__all__: list[str] = []

register()
