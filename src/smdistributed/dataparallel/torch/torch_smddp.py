"""Importing this module makes ``init_process_group("smddp")`` work; nothing else of it is used."""

from opensmd.collectives.backend import register

__all__: list[str] = []

register()
