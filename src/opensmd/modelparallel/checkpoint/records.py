"""Checking zip archives without a checksum of the whole: those of plain torch.save or earlier versions."""

from __future__ import annotations

import zipfile
from pathlib import Path

from opensmd.modelparallel.exceptions import SMPCheckpointError

__all__ = ["verify_records"]

_DIRECTORY_ATTRIBUTE = 0x10


def verify_records(path: Path) -> None:
    """Check every byte of a file's records against their checksums and the archive's directory.

    Raises:
        SMPCheckpointError: the file is damaged, incomplete, or was not written by torch.save.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            records = archive.infolist()
            damaged = archive.testzip()
    except Exception as error:  # damage can raise any error of zipfile, zlib or struct
        raise SMPCheckpointError(
            f"{path} is damaged, incomplete, or was not written by torch.save: {error}"
        ) from error
    if not any(record.filename.endswith("/data.pkl") for record in records):
        raise SMPCheckpointError(f"{path} is a zip file, but not one that torch.save or smp.save wrote")
    if damaged is not None:
        raise SMPCheckpointError(f"{path} is damaged: the checksum of its record {damaged!r} is wrong")
    for record in records:
        # torch takes such a record for a folder or an empty record, and returns memory that it did not fill
        if record.external_attr & _DIRECTORY_ATTRIBUTE or record.compress_size != record.file_size:
            raise SMPCheckpointError(
                f"{path} is damaged: its directory says of the record {record.filename!r} what "
                "torch never writes"
            )
