"""Files and folders that no other user of the machine can change.

What is loaded as code, or written by name, must be where only this user and root can put anything. That
applies to the file, every folder above it, and every link on the way.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

__all__ = ["make_folder", "open_own", "private_folder", "temporary_folder", "who_else_can_change"]

_MOST_LINKS = 40  # as in the kernel
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def who_else_can_change(path: Path) -> str | None:
    """Say why another user could have written what is at ``path``; None if nobody could.

    The last part must not be a link. For a path that does not exist, the existing part is checked.
    """
    for place, status, last in _places(path):
        if status.st_uid not in (0, os.geteuid()):
            return f"{place} belongs to {_user(status.st_uid)}"
        if stat.S_ISLNK(status.st_mode):
            if last:
                return f"{place} is a link"
        elif _others_write(status) and (last or not status.st_mode & stat.S_ISVTX):
            return f"other users may write to {place} (mode {stat.S_IMODE(status.st_mode):o})"
    return None


def _places(path: Path) -> Iterator[tuple[Path, os.stat_result, bool]]:
    """Yield every folder and link that the kernel passes on its way to ``path``, and finally its target."""
    here = Path("/")
    ahead = list(path.absolute().parts[1:])
    links = 0
    yield here, here.lstat(), not ahead
    while ahead:
        part = ahead.pop(0)
        here = here.parent if part == ".." else here / part
        try:
            status = here.lstat()
        except (FileNotFoundError, NotADirectoryError):
            return
        yield here, status, not ahead
        if ahead and stat.S_ISLNK(status.st_mode):
            links += 1
            if links > _MOST_LINKS:
                raise OSError(f"too many links on the way to {path}")
            target = here.readlink()
            ahead = [*(target.parts[1:] if target.is_absolute() else target.parts), *ahead]
            here = Path("/") if target.is_absolute() else here.parent


def _others_write(status: os.stat_result) -> bool:
    """Whether users other than the owner may write there; the owner's private group does not count."""
    if not status.st_mode & _OTHERS_WRITE:
        return False
    return bool(status.st_mode & stat.S_IWOTH) or not _is_own_group(status.st_uid, status.st_gid)


@cache
def _is_own_group(user: int, group: int) -> bool:
    """Whether it is a user's private group, as on many systems: with the user's name and no other member."""
    try:
        group_entry, user_entry = grp.getgrgid(group), pwd.getpwuid(user)
    except KeyError:
        return False
    return group_entry.gr_name == user_entry.pw_name and set(group_entry.gr_mem) <= {user_entry.pw_name}


def _user(number: int) -> str:
    try:
        return f"the user {pwd.getpwuid(number).pw_name}"
    except KeyError:
        return f"user {number}"


def make_folder(path: Path) -> None:
    """Create a folder and its missing parents for this user only, whatever the umask.

    Raises:
        OSError: it cannot be created.
    """
    for folder in reversed([path, *path.parents]):
        if not folder.is_dir():
            folder.mkdir(mode=0o700, exist_ok=True)


def open_own(path: Path) -> int:
    """Open a file for reading and writing, creating it if needed; not through a link, and without truncating.

    Raises:
        OSError: it cannot be opened, is a link, or is not a file.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(f"{path} is not a file")
    return fd


@cache
def private_folder(folder: Path) -> Path:
    """Return ``folder``, created if needed, or another folder, with a warning, if others could write to it.

    Likewise if it cannot be created, because the home folder is read-only or somebody else's.

    Raises:
        OSError: no other can be created, either.
    """
    why = who_else_can_change(folder) or _cannot_be_made(folder) or who_else_can_change(folder)
    if why is None:
        return folder
    instead = _another_folder()
    warnings.warn(
        f"compiled code is not kept in {folder}: {why}. {instead} is used instead; to choose another folder "
        "that only you can write to, set OPENSMD_CACHE_DIR",
        RuntimeWarning,
        stacklevel=2,
    )
    return instead


def _cannot_be_made(folder: Path) -> str | None:
    try:
        make_folder(folder)
    except FileExistsError as error:
        return f"{error.filename} is a file"
    except OSError as error:
        return f"it cannot be made ({error.strerror})"
    return None


def temporary_folder() -> Path:
    """Return where to keep compiled code of a user without a home."""
    return Path(tempfile.gettempdir()) / f"opensmd-{os.geteuid()}"


def _another_folder() -> Path:
    """Return a folder for compiled code that only this user can write, the same each time if possible."""
    candidates = [temporary_folder()]
    with suppress(KeyError):  # a user without a name, as in containers
        candidates.insert(0, Path(pwd.getpwuid(os.geteuid()).pw_dir) / ".cache" / "opensmd")
    for folder in candidates:
        with suppress(OSError):
            if who_else_can_change(folder) is None:
                make_folder(folder)
                if who_else_can_change(folder) is None and os.access(folder, os.W_OK):
                    return folder
    return Path(tempfile.mkdtemp(prefix="opensmd-"))
