"""Another user of this machine plants and overwrites what he can: nothing of his is accepted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from opensmd.native import build

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can play another user of the machine")
NOBODY = 65534


@needs_root
def test_shared_memory_of_another_user_is_not_opened() -> None:
    native = build.load()
    shape = native.ArenaShape()
    shape.size = 2
    file = native.create_arena_file(shape, True)
    try:
        os.close(native.open_arena_file(file.path, file.token))
        os.chown(file.path, NOBODY, NOBODY)
        with pytest.raises(RuntimeError, match=f"belongs to user {NOBODY}, this process to user 0"):
            native.open_arena_file(file.path, file.token)
    finally:
        os.close(file.fd)
        native.unlink_arena_file(file)


def test_shared_memory_behind_a_link_is_not_opened() -> None:
    native = build.load()
    shape = native.ArenaShape()
    shape.size = 2
    file = native.create_arena_file(shape, True)
    link = Path(f"{file.path}-link")
    try:
        link.symlink_to(file.path)
        with pytest.raises(RuntimeError, match="cannot open"):
            native.open_arena_file(str(link), file.token)
    finally:
        link.unlink()
        os.close(file.fd)
        native.unlink_arena_file(file)
