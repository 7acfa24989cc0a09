"""The end of a checkpoint file: what the file is part of, and a checksum of all its bytes.

Both are in the comment of the zip archive, which torch and zip tools skip::

    torch's zip archive ... directory | length of comment | opensmd:1:<crc32>:{"save": ..., "part": 0, ...}
    `-------- under the checksum ----'                                        `---- under the checksum ---'

Records have checksums of their own, but the directory that says where they are has none: one bit of it
makes torch return memory that it never wrote to. CRC-32 detects every error of up to 32 bits in a row and all
but one in 4e9 others; zlib's is the fastest checksum in Python's library (4 GB/s; SHA-256 1.4, BLAKE2b 0.8).
None of them stops forgers, who can recompute it. Files of earlier versions have their label in a record of
the archive and no such checksum; other libraries' files have neither.
"""

from __future__ import annotations

import json
import re
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from torch.serialization import get_crc32_options

from opensmd.modelparallel.checkpoint.checksum import combined
from opensmd.modelparallel.exceptions import SMPCheckpointError

__all__ = ["Label", "Seal", "SealingFile", "is_zip", "read_label", "read_seal"]

RECORD = "opensmd.json"
ZIP = b"PK\x03\x04"
_END_OF_DIRECTORY = b"PK\x05\x06"
_LENGTH_AT = 20  # in the end of central directory: two bytes, then the comment
_CHUNK = 1 << 22
_LARGE = 1 << 18  # bytes: the checksum of fewer is cheap to compute
_DESCRIPTOR = b"PK\x07\x08"
_COMMENT = re.compile(rb"opensmd:1:([0-9a-f]{8}):(\{.*\})", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Label:
    """What a file is part of.

    Attributes:
        save: the same in all files of one save, and unique to it.
        part, parts: the number of this part, and how many there are.
    """

    save: str
    part: int
    parts: int

    @classmethod
    def parsed(cls, text: bytes, path: Path) -> Label:
        """Parse the label in a file, ignoring fields that later versions may add.

        Raises:
            SMPCheckpointError: it is damaged.
        """
        try:
            fields = json.loads(text)
            label = cls(save=fields["save"], part=fields["part"], parts=fields["parts"])
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise SMPCheckpointError(f"{path} is damaged: its label {text[:80]!r} cannot be read") from error
        if not _is_name(label.save) or type(label.part) is not int or type(label.parts) is not int:
            raise SMPCheckpointError(f"{path} is damaged: its label {text[:80]!r} makes no sense")
        if not 0 <= label.part < label.parts:
            raise SMPCheckpointError(
                f"{path} is damaged: it says that it is part {label.part} of {label.parts}"
            )
        return label


@dataclass(frozen=True, kw_only=True)
class Seal:
    """The end of a file as written.

    Attributes:
        label: what the file is part of.
        crc: of the first ``covered`` bytes and ``text``.
        covered: how many bytes of the file come before the comment's length.
        text: the label as it is in the file.
    """

    label: Label
    crc: int
    covered: int
    text: bytes

    def verify(self, path: Path) -> None:
        """Compare the checksum with the file.

        Raises:
            SMPCheckpointError: they differ.
        """
        crc, left = 0, self.covered
        buffer = memoryview(bytearray(_CHUNK))
        with path.open("rb", buffering=0) as file:
            while left:
                count = file.readinto(buffer[: min(left, _CHUNK)])
                if not count:
                    break
                crc = zlib.crc32(buffer[:count], crc)
                left -= count
        if left or zlib.crc32(self.text, crc) != self.crc:
            raise SMPCheckpointError(
                f"{path} is damaged: its content does not have the checksum that it was written with"
            )


class SealingFile:
    """A file for ``torch.save`` that computes the checksum while writing.

    torch writes a checksum of each tensor after it, so large tensors need not be read twice::

        ... | a tensor's bytes | PK 07 08, their checksum, their number (twice) | ...

    Args:
        file: also open for reading.
        between: called between pieces of the write.

    Attributes:
        failure: the system's error when a write failed; torch raises a different one.
    """

    def __init__(self, file: IO[bytes], between: Callable[[], None] | None = None) -> None:
        self._file = file
        self._between = between
        self._crc = 0
        self._last = b""  # the comment's length, which the checksum leaves out
        self._large = 0  # bytes written last, whose checksum is yet to come
        self._is_told = get_crc32_options()  # without this option, torch writes none
        self.failure: OSError | None = None

    def write(self, data: Any) -> int:
        """Append bytes."""
        view = memoryview(data).cast("B")
        if self._large:
            self._add_large(bytes(view[:24]))
        try:
            self._write(view)
        except OSError as error:
            self.failure = error
            raise
        if len(view) < 2:
            tail = self._last + bytes(view)
            self._crc, self._last = zlib.crc32(tail[:-2], self._crc), tail[-2:]
            return len(view)
        self._crc = zlib.crc32(self._last, self._crc)
        if self._is_told and len(view) >= _LARGE:
            self._large, self._last = len(view), b""
        else:
            self._crc, self._last = zlib.crc32(view[:-2], self._crc), bytes(view[-2:])
        return len(view)

    def _write(self, view: memoryview) -> None:
        for at in range(0, len(view), _CHUNK):
            self._file.write(view[at : at + _CHUNK])
            if self._between is not None:
                self._between()

    def _add_large(self, following: bytes) -> None:
        """Include the bytes written last, using their checksum from ``following``."""
        width = 4 if following[12:16] == following[8:12] else 8
        if following[:4] == _DESCRIPTOR and int.from_bytes(following[8 : 8 + width], "little") == self._large:
            crc = int.from_bytes(following[4:8], "little")
        else:
            crc = self._crc_on_disk(self._large)
        self._crc, self._large = combined(self._crc, crc, self._large), 0

    def _crc_on_disk(self, count: int) -> int:
        """Return the checksum of the bytes written last."""
        end = self._file.seek(-count, 1) + count
        crc = 0
        while (at := self._file.tell()) < end:
            crc = zlib.crc32(self._file.read(min(_CHUNK, end - at)), crc)
        return crc

    def flush(self) -> None:
        """Do nothing: nothing is buffered, but torch calls this."""

    def seal(self, label: Label) -> None:
        """Append the label and the checksum to what torch has written."""
        assert not self._large and self._last == b"\0\0", "torch wrote a zip archive without a comment"
        text = json.dumps(asdict(label)).encode()
        comment = b"opensmd:1:%08x:%s" % (zlib.crc32(text, self._crc), text)
        self._file.seek(-2, 1)
        self._file.write(len(comment).to_bytes(2, "little") + comment)


def read_seal(path: Path) -> Seal | None:
    """Read the end of a file; None if it has none, because an earlier version or another library wrote it.

    Raises:
        SMPCheckpointError: the seal is damaged.
    """
    with path.open("rb") as file:
        size = file.seek(0, 2)
        start = max(0, size - 0xFFFF - 22)
        file.seek(start)
        tail = file.read()
    end = tail.rfind(_END_OF_DIRECTORY)
    if end < 0:
        return None
    covered = end + _LENGTH_AT
    length = int.from_bytes(tail[covered : covered + 2], "little")
    comment = tail[covered + 2 :]
    if not comment and not length:
        return None
    found = _COMMENT.fullmatch(comment)
    if found is None or len(comment) != length:
        if not is_zip(path):
            return None  # these four bytes are other data
        raise SMPCheckpointError(f"{path} is damaged or incomplete: its last {len(comment)} bytes are wrong")
    label = Label.parsed(found[2], path)
    return Seal(label=label, crc=int(found[1], 16), covered=start + covered, text=found[2])


def read_label(path: Path) -> Label | None:
    """Read what a file is part of; None if ``smp.save`` did not write it.

    Raises:
        SMPCheckpointError: it is damaged, or was not written by torch.save.
    """
    seal = read_seal(path)
    if seal is not None:
        return seal.label
    try:
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                if name.endswith(f"/{RECORD}"):
                    return Label.parsed(archive.read(name), path)
    except SMPCheckpointError:
        raise
    except Exception as error:  # zipfile's, zlib's, struct's: damage comes as any of them
        raise SMPCheckpointError(
            f"{path} is damaged, incomplete, or was not written by torch.save: {error}"
        ) from error
    return None


def is_zip(path: Path) -> bool:
    """Whether a file begins like torch's."""
    with path.open("rb") as file:
        return file.read(len(ZIP)) == ZIP


def _is_name(save: object) -> bool:
    return isinstance(save, str) and re.fullmatch(r"[0-9a-zA-Z]{1,64}", save) is not None
