"""Namespaces of Linux for this process itself, where ``ip netns`` and ``unshare`` start another program."""

from __future__ import annotations

import ctypes
import os

__all__ = ["enter_network", "mount_over"]

_NAMESPACES = "/var/run/netns"
_NEW_MOUNTS, _NEW_NETWORK = 0x20000, 0x40000000
_DETACH, _RECURSIVE, _SLAVE = 0x2, 0x4000, 0x80000

_libc = ctypes.CDLL(None, use_errno=True)


def enter_network(name: str) -> None:
    """Go on in the network namespace of this name, with its ``/sys``, which lists its network's devices.

    Raises:
        OSError: there is none, or this user may not enter it.
    """
    namespace = os.open(f"{_NAMESPACES}/{name}", os.O_RDONLY)
    try:
        _check(_libc.setns(namespace, _NEW_NETWORK))
    finally:
        os.close(namespace)
    mount_over("/sys", "sysfs")


def mount_over(folder: str, kind: str, options: str = "") -> None:
    """Mount a file system of this kind in place of what is mounted there, for this process and its children.

    Raises:
        OSError: this user may not mount.
    """
    _check(_libc.unshare(_NEW_MOUNTS))
    _check(_libc.mount(b"", b"/", b"none", _SLAVE | _RECURSIVE, None))
    _check(_libc.umount2(folder.encode(), _DETACH))
    _check(_libc.mount(kind.encode(), folder.encode(), kind.encode(), 0, options.encode()))


def _check(failed: int) -> None:
    if failed:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
