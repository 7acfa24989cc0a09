"""The end of a checkpoint file: written on the way, read back, and wrong for every bit that has changed."""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.serialization import get_crc32_options, set_crc32_options

from opensmd.modelparallel.checkpoint import seal as seals
from opensmd.modelparallel.checkpoint.seal import Label, SealingFile, read_label, read_seal
from opensmd.modelparallel.exceptions import SMPCheckpointError

LABEL = Label(save="abc", part=1, parts=2)


def sealed(path: Path) -> Path:
    with path.open("wb") as file:
        sealing = SealingFile(file)
        torch.save({"weight": torch.arange(8.0)}, sealing)  # type: ignore[arg-type]
        sealing.seal(LABEL)
    return path


def test_a_sealed_file_has_its_label_and_its_checksum_and_torch_reads_it(tmp_path: Path) -> None:
    path = sealed(tmp_path / "x.pt")
    seal = read_seal(path)
    assert seal is not None and seal.label == LABEL == read_label(path)
    seal.verify(path)
    assert torch.load(path)["weight"].tolist() == list(range(8))


def test_no_bit_under_the_checksum_can_change_unnoticed(tmp_path: Path) -> None:
    path = sealed(tmp_path / "x.pt")
    seal = read_seal(path)
    assert seal is not None
    content = path.read_bytes()
    for place in range(0, seal.covered, 7):
        path.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
        with pytest.raises(SMPCheckpointError, match="does not have the checksum"):
            seal.verify(path)


def test_a_label_that_says_another_part_is_found_out(tmp_path: Path) -> None:
    path = sealed(tmp_path / "x.pt")
    path.write_bytes(path.read_bytes().replace(b'"part": 1', b'"part": 0'))
    seal = read_seal(path)
    assert seal is not None and seal.label.part == 0
    with pytest.raises(SMPCheckpointError, match="does not have the checksum"):
        seal.verify(path)


def test_a_file_that_has_lost_its_end_is_damaged(tmp_path: Path) -> None:
    path = sealed(tmp_path / "x.pt")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(SMPCheckpointError, match="damaged or incomplete"):
        read_seal(path)


def test_plain_torch_files_and_others_have_no_seal(tmp_path: Path) -> None:
    torch.save([1], tmp_path / "plain.pt")
    (tmp_path / "other").write_bytes(b"some bytes, PK\x05\x06 among them" + bytes(40))
    assert read_seal(tmp_path / "plain.pt") is None and read_label(tmp_path / "plain.pt") is None
    assert read_seal(tmp_path / "other") is None


@pytest.mark.parametrize("sizes", [[10], [1, 1, 1, 7], [0, 5, 1, 4], [2, 2, 2, 2, 2]])
def test_the_checksum_does_not_depend_on_the_pieces_in_which_torch_writes(sizes: list[int]) -> None:
    data = b"12345678\0\0"
    file = io.BytesIO()
    sealing, rest = SealingFile(file), data
    for size in sizes:
        sealing.write(rest[:size])
        rest = rest[size:]
    sealing.seal(LABEL)
    text = file.getvalue()[len(data) :].split(b":", 3)[3]
    assert file.getvalue()[len(data) :].split(b":")[2] == b"%08x" % zlib.crc32(text, zlib.crc32(b"12345678"))


def test_what_the_system_said_of_a_write_is_kept() -> None:
    class Full(io.BytesIO):
        def write(self, data: object) -> int:
            raise OSError(28, "No space left on device")

    sealing = SealingFile(Full())
    with pytest.raises(OSError, match="No space left"):
        sealing.write(b"1234")
    assert sealing.failure is not None and sealing.failure.errno == 28


# --- large tensors, which are not gone through a second time -----------------------------------------------

CONTENT = {"large": torch.randn(3, 250_001), "odd": torch.arange(7), "text": "x", "more": torch.ones(1 << 19)}


@pytest.fixture(params=[True, False])
def torch_sums(request: pytest.FixtureRequest) -> Iterator[bool]:
    before = get_crc32_options()
    set_crc32_options(request.param)
    yield request.param
    set_crc32_options(before)


def test_the_checksum_is_that_of_the_file(tmp_path: Path, torch_sums: bool) -> None:
    path = tmp_path / "x.pt"
    with path.open("w+b") as file:
        target = SealingFile(file)
        torch.save(CONTENT, target)  # type: ignore[arg-type]
        target.seal(LABEL)
    found = read_seal(path)
    assert found is not None
    found.verify(path)
    for name, value in torch.load(path).items():
        assert value == "x" if name == "text" else torch.equal(value, CONTENT[name])  # type: ignore[arg-type]


def test_large_tensors_are_summed_by_torch_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summed = []

    class Counting:
        @staticmethod
        def crc32(data: bytes, value: int = 0) -> int:
            summed.append(len(data))
            return zlib.crc32(data, value)

    monkeypatch.setattr(seals, "zlib", Counting)
    with (tmp_path / "x.pt").open("w+b") as file:
        torch.save(CONTENT, SealingFile(file))  # type: ignore[arg-type]
    assert sum(summed) < 10_000


def test_a_checksum_that_nobody_tells_is_computed_from_the_file(tmp_path: Path) -> None:
    large, end = bytes(range(256)) * 4096, b"PK\x05\x06" + bytes(18)
    with (tmp_path / "x").open("w+b") as file:
        target = SealingFile(file)
        for data in (b"begin", large, b"PK\x07\x08" + bytes(12), large, large, end):
            target.write(data)
        target.seal(LABEL)
    found = read_seal(tmp_path / "x")
    assert found is not None
    found.verify(tmp_path / "x")
