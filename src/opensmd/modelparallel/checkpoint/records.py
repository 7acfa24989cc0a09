"""Checking a zip archive that has no checksum of the whole: plain torch.save's, or an earlier version's."""

from __future__ import annotations

import zipfile
from pathlib import Path

from opensmd.modelparallel.exceptions import SMPCheckpointError

__all__ = ["verify_records"]

_DIRECTORY_ATTRIBUTE = 0x10


def verify_records(path: Path) -> None:
    """Check every byte of a file's records against their checksums, and what the directory says of them.

    Raises:
        SMPCheckpointError: it is damaged, incomplete, or was not written by torch.save.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            records = archive.infolist()
            damaged = archive.testzip()
    except Exception as error:  # zipfile's, zlib's, struct's: damage comes as any of them
        raise SMPCheckpointError(
            f"{path} is damaged, incomplete, or was not written by torch.save: {error}"
        ) from error
    if not any(record.filename.endswith("/data.pkl") for record in records):
        raise SMPCheckpointError(f"{path} is a zip file, but not one that torch.save or smp.save wrote")
    if damaged is not None:
        raise SMPCheckpointError(f"{path} is damaged: the checksum of its record {damaged!r} is wrong")
    for record in records:
        # torch takes such a record for a folder, or for an empty one, and returns memory that it did not fill
        if record.external_attr & _DIRECTORY_ATTRIBUTE or record.compress_size != record.file_size:
            raise SMPCheckpointError(
                f"{path} is damaged: its directory says of the record {record.filename!r} what "
                "torch never writes"
            )
