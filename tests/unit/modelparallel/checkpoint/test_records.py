"""Files without a checksum of the whole: their records' checksums, and what the directory says of them."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch

from opensmd.modelparallel.checkpoint.records import verify_records
from opensmd.modelparallel.exceptions import SMPCheckpointError

ATTRIBUTES_AT = 38  # in an entry of the directory
ENTRY = b"PK\x01\x02"


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    torch.save({"weight": torch.full((64,), 7.0)}, tmp_path / "plain.pt")
    return tmp_path / "plain.pt"


def test_a_file_of_torch_save_passes(plain: Path) -> None:
    verify_records(plain)


def test_a_bit_in_a_tensor_is_found_with_the_name_of_its_record(plain: Path) -> None:
    content = plain.read_bytes()
    place = content.index(torch.full((64,), 7.0).numpy().tobytes())
    plain.write_bytes(content[:place] + b"\1" + content[place + 1 :])
    with pytest.raises(SMPCheckpointError, match=r"the checksum of its record 'plain/data/0' is wrong"):
        verify_records(plain)


def test_a_record_that_the_directory_calls_a_folder_is_damage(plain: Path) -> None:
    content = plain.read_bytes()
    place = content.index(ENTRY) + ATTRIBUTES_AT
    plain.write_bytes(content[:place] + b"\x10" + content[place + 1 :])
    with pytest.raises(SMPCheckpointError, match="what torch never writes"):
        verify_records(plain)


def test_a_compressed_record_is_nothing_that_torch_writes(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data.pkl", bytes(1000))
    with pytest.raises(SMPCheckpointError, match="what torch never writes"):
        verify_records(tmp_path / "x.pt")


def test_another_zip_file_is_told_from_a_damaged_one(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("readme", "hello")
    with pytest.raises(SMPCheckpointError, match="a zip file, but not one that torch"):
        verify_records(tmp_path / "x.zip")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(SMPCheckpointError, match=r"was not written by torch\.save"):
        verify_records(tmp_path / "text")
