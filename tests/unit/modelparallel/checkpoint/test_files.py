"""Checkpoint files by themselves: what may be in them, what is said of what may not, damage, full disks."""

from __future__ import annotations

import argparse
import collections
import datetime
import errno
import json
import os
import pathlib
import pickle
import random
import resource
import traceback
import types
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from opensmd.modelparallel.checkpoint.files import Caller, commit, read, write_aside
from opensmd.modelparallel.checkpoint.save_load import load, save
from opensmd.modelparallel.checkpoint.seal import RECORD, Label, read_label
from opensmd.modelparallel.exceptions import SMPCheckpointError


class OfTheScript:
    """A class that torch knows nothing of."""

    def __init__(self, value: Any = 1) -> None:
        self.value = value


class Malicious:
    """Pickled, it becomes a call of the shell."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


def put(obj: Any, path: Path, **options: Any) -> None:
    label = Label(save="abc", part=0, parts=1)
    commit(write_aside(obj, path, label, caller=Caller(), **options), path, alone=True)


def kept(value: Any, tmp_path: Path) -> Any:
    save({"value": value}, str(tmp_path / "x.pt"), partial=False)
    return load(str(tmp_path / "x.pt"), partial=False)["value"]


HARMLESS = [
    np.float64(0.1),
    np.int32(3),
    np.bool_(True),
    np.datetime64("2024-01-02"),
    np.dtype("float32"),
    np.arange(6, dtype=np.int16).reshape(2, 3),
    np.array(["a", "bc"]),
    np.array([1, "a", None], dtype=object),
    random.Random(3).getstate(),
    np.random.RandomState(3).get_state(),
    np.random.default_rng(3).bit_generator.state,
    argparse.Namespace(lr=0.1, path=pathlib.Path("/a/b"), steps=np.int64(4)),
    types.SimpleNamespace(a=1),
    pathlib.PurePosixPath("a"),
    pathlib.PureWindowsPath("c:/a"),
    datetime.datetime(2024, 1, 2, 3, 4, 5, tzinfo=datetime.UTC),
    datetime.date(2024, 1, 2),
    datetime.time(1, 2),
    datetime.timedelta(3),
    collections.OrderedDict(a=1),
    collections.Counter("abca"),
    frozenset([1]),
    range(3),
    slice(1, 2),
    b"bytes",
    b"",
    10**60,
]


@pytest.mark.parametrize(
    "value", HARMLESS, ids=lambda value: f"{type(value).__module__}.{type(value).__name__}"
)
def test_harmless_values_come_back_as_they_were(value: Any, tmp_path: Path) -> None:
    found = kept(value, tmp_path)
    assert type(found) is type(value)
    assert repr(found) == repr(value)


def test_states_of_learning_rate_schedulers_come_back(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    schedulers = torch.optim.lr_scheduler
    for scheduler in (
        schedulers.LambdaLR(optimizer, lambda step: np.float64(0.5) ** step),
        schedulers.MultiStepLR(optimizer, [1, 2]),
        schedulers.OneCycleLR(optimizer, 0.1, total_steps=9),
        schedulers.ReduceLROnPlateau(optimizer),
    ):
        optimizer.step()
        scheduler.step(*([1.0] if isinstance(scheduler, schedulers.ReduceLROnPlateau) else []))
        assert kept(scheduler.state_dict(), tmp_path) == scheduler.state_dict()


def test_configurations_of_transformers_come_back(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    for configuration in (transformers.GPT2Config(n_layer=3), transformers.CLIPConfig()):
        found = kept(argparse.Namespace(config=configuration), tmp_path).config
        assert type(found) is type(configuration)
        assert found.to_dict() == configuration.to_dict()


def test_functions_in_modules_of_configurations_are_refused(tmp_path: Path) -> None:
    """The name of a module is no reason to trust what is in it."""
    pytest.importorskip("transformers")
    data = b"\x80\x02ctransformers.configuration_utils\ncopy.deepcopy\n."
    for name in (b"recursive_diff_dict", b"os", b"json"):
        path = tmp_path / "x.pt"
        torch.save({}, path)
        replace_pickle(path, data.replace(b"copy.deepcopy", name))
        with pytest.raises(SMPCheckpointError, match=f"asks for transformers.*{name.decode()}"):
            read(path)


def test_what_the_script_has_allowed_itself_stays_allowed(tmp_path: Path) -> None:
    with torch.serialization.safe_globals([OfTheScript, range]):
        assert kept(OfTheScript(5), tmp_path).value == 5
        assert range in torch.serialization.get_safe_globals()
    assert np.ndarray not in torch.serialization.get_safe_globals()


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"a": [1, OfTheScript()]}, r"obj\['a'\]\[1\] is of type .*OfTheScript, which would not load again"),
        ({"args": argparse.Namespace(x=OfTheScript())}, r"obj\['args'\]\.x is of type .*OfTheScript"),
        ({"f": os.path.join}, r"obj\['f'\] is the function or class posixpath\.join"),
        ({"d": collections.defaultdict(int)}, r"obj\['d'\] is of type collections\.defaultdict"),
        ({OfTheScript: 1}, r"the key <class .*OfTheScript'> of obj is the function or class"),
        ({"n": 1 << 3000}, r"obj\['n'\] is of type builtins\.int"),
        ([lambda: 1], r"obj\[0\] is the function or class .*lambda.* cannot be saved"),
    ],
)
def test_what_would_not_load_is_refused_when_it_is_saved(value: Any, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    save({"before": torch.ones(2)}, str(path), partial=False)
    with pytest.raises(TypeError, match=reason):
        save(value, str(path), partial=False)
    assert load(str(path), partial=False)["before"].tolist() == [1, 1], "the older file is untouched"
    assert list(tmp_path.iterdir()) == [path]


def test_anything_goes_into_files_of_ones_own(tmp_path: Path) -> None:
    path = str(tmp_path / "x.pt")
    save(OfTheScript(7), path, partial=False, weights_only=False)
    with pytest.raises(
        SMPCheckpointError, match=r"asks for tests\.unit\.modelparallel\.checkpoint\.test_files\.OfTheScript"
    ):
        load(path, partial=False)
    assert load(path, partial=False, weights_only=False).value == 7


def test_a_protocol_that_would_not_load_is_replaced_with_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    with pytest.warns(UserWarning, match="pickle_protocol=4 is not used"):
        save({"a": torch.ones(2), "b": "text"}, str(path), partial=False, pickle_protocol=4)
    assert load(str(path), partial=False)["b"] == "text"
    save({"b": "text"}, str(path), partial=False, pickle_protocol=4, weights_only=False)
    with pytest.raises(
        SMPCheckpointError, match="was written with pickle_protocol=4, and files load without"
    ):
        load(str(path), partial=False)
    assert load(str(path), partial=False, weights_only=False) == {"b": "text"}


def test_a_malicious_file_is_refused_by_the_name_of_what_it_calls_and_runs_nothing(tmp_path: Path) -> None:
    path, marker = tmp_path / "x.pt", tmp_path / "ran"
    for obj in (Malicious(marker), {"deep": [Malicious(marker)]}):
        torch.save(obj, path)
        with pytest.raises(SMPCheckpointError) as refused:
            load(str(path), partial=False)
        text = str(refused.value)
        assert "asks for posix.system" in text and "nothing in the file was run" in text
        assert "never do so with files of others" in text
        assert "add_safe_globals" not in text and "two options" not in text
    torch.save(Malicious(marker), path, _use_new_zipfile_serialization=False)
    with pytest.raises(
        SMPCheckpointError, match=r"a pickle that asks for posix\.system, of which nothing was run"
    ):
        load(str(path), partial=False)
    path.write_bytes(pickle.dumps(Malicious(marker), protocol=2))
    with pytest.raises(SMPCheckpointError, match=r"x\.pt"):
        load(str(path), partial=False)
    assert not marker.exists()


def test_files_are_torchs_own_format(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    put({"a": torch.arange(5), "b": nn.Parameter(torch.ones(3))}, path)
    for options in ({}, {"mmap": True}, {"map_location": "meta"}):
        found = torch.load(path, **options)
        assert found["a"].shape == (5,) and isinstance(found["b"], nn.Parameter)
    assert torch.load(path)["a"].tolist() == [0, 1, 2, 3, 4]
    assert load(str(path), partial=False, mmap=True)["a"].tolist() == [0, 1, 2, 3, 4]
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None


def replace_pickle(path: Path, data: bytes) -> None:
    """Give a file of torch's another pickle, with the right checksums."""
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in records.items():
            archive.writestr(name, data if name.endswith("/data.pkl") else content)


def as_earlier_versions(obj: Any, path: Path, label: str) -> None:
    """Write a file with its label as a record, and without a checksum of the whole."""
    torch.save(obj, path)
    with zipfile.ZipFile(path, "a") as archive:
        root = archive.namelist()[0].partition("/")[0]
        archive.writestr(f"{root}/{RECORD}", label)


def test_files_of_earlier_versions_load(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    as_earlier_versions({"a": torch.ones(3)}, path, json.dumps({"save": "ab", "part": 0, "parts": 1}))
    assert read_label(path) == Label(save="ab", part=0, parts=1)
    assert read(path)["a"].tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("label", "reason"),
    [
        ('{"save": "ab", "part": 0}', "cannot be read"),
        ('{"save": "ab", "part": "0", "parts": 1}', "makes no sense"),
        ('{"save": "../..", "part": 0, "parts": 1}', "makes no sense"),
        ('{"save": "ab", "part": 3, "parts": 2}', "part 3 of 2"),
        ("[1]", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
        ("\xff{", "cannot be read"),
    ],
)
def test_labels_that_make_no_sense_are_damage(label: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    as_earlier_versions({}, path, label)
    with pytest.raises(SMPCheckpointError, match=rf"x\.pt is damaged.*{reason}"):
        read_label(path)


def test_a_label_with_fields_of_later_versions_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    as_earlier_versions({}, path, '{"save": "ab", "part": 0, "parts": 1, "more": 5}')
    assert read_label(path) == Label(save="ab", part=0, parts=1)


def test_memory_that_was_never_written_is_not_taken_for_a_tensor(tmp_path: Path) -> None:
    """One bit of the directory makes torch skip a record, also of files without a checksum of the whole."""
    path = tmp_path / "x.pt"
    for write in (put, torch.save):
        write({"a": torch.full((1000,), 7.0)}, path)
        content = bytearray(path.read_bytes())
        entry = content.index(b"PK\x01\x02", content.index(b"PK\x01\x02") + 1)
        while b"data/0" not in content[entry : entry + 80]:
            entry = content.index(b"PK\x01\x02", entry + 4)
        content[entry + 38] |= 0x10
        path.write_bytes(content)
        with pytest.raises(SMPCheckpointError, match=r"x\.pt is damaged"):
            read(path)


@pytest.fixture
def small_disk() -> Iterator[int]:
    """No file of this process grows beyond so many bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    yield 100_000
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("elements", [24_300, 50_000, 500_000])
def test_a_disk_that_takes_no_more_is_named_with_the_file(
    small_disk: int, tmp_path: Path, elements: int
) -> None:
    path = tmp_path / "x.pt"
    small = {"a": torch.ones(3), "b": torch.arange(elements - 24_000)[:3].clone()}
    put(small, path)
    with pytest.raises(OSError, match=r"x\.pt") as refused:
        put({"a": torch.zeros(elements + 1_000)}, path)
    assert refused.value.errno == errno.EFBIG
    assert "inline_container" not in "".join(traceback.format_exception(refused.value)), "torch's own words"
    assert read(path)["a"].tolist() == [1, 1, 1], "the older file is untouched"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_is_not_there_is_named_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "none" / "x.pt"
    with pytest.raises(FileNotFoundError) as raised:
        save({"value": 1}, str(path), partial=False)
    assert str(raised.value) == (
        f"smp.save: {path} cannot be written, as there is no folder {path.parent}; make it first"
    )


@pytest.mark.parametrize(
    "content",
    [b"", b"P", b"PK\x03\x04", b"PK\x05\x06" + bytes(18), b"not a checkpoint", bytes(3000),
     b"\x80\x02]q\x00.", b"PK\x03\x04" + bytes(90) + b"PK\x05\x06" + b"\xff" * 18],
)  # fmt: skip
def test_foreign_files_are_refused_with_their_name(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(content)
    with warnings.catch_warnings(), pytest.raises(SMPCheckpointError, match=r"x\.pt"):
        warnings.simplefilter("ignore")
        load(str(path), partial=False)


def test_the_format_that_torch_had_before_zip_loads(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"a": torch.ones(2)}, path, _use_new_zipfile_serialization=False)
    assert load(str(path), partial=False)["a"].tolist() == [1, 1], "torch's own older format loads"


class Pickled:
    """Becomes whatever call, arguments and state it is given."""

    def __init__(self, *reduced: Any) -> None:
        self.reduced = reduced

    def __reduce__(self) -> Any:
        return self.reduced


def array_of(dtype: Any, data: Any, *, shape: Any = (1,)) -> Pickled:
    rebuild, arguments, _ = np.zeros(1).__reduce__()  # type: ignore[misc]
    return Pickled(rebuild, arguments, (1, shape, dtype, False, data))


def dtype_of(code: str, *state: Any, copy: bool = True) -> Pickled:
    return Pickled(np.dtype, (code, False, copy), state)


PLAIN = (3, "|", None, None, None, -1, -1, 0)
SCALAR = np.float64(0).__reduce__()[0]  # type: ignore[index]


@pytest.mark.parametrize(
    "value",
    [
        array_of(dtype_of("O", *PLAIN), b"A" * 8),
        array_of(dtype_of("f8", *PLAIN[:-1], 63), [1.0]),
        array_of(dtype_of("f8", *PLAIN, copy=False), b"A" * 8),
        array_of(dtype_of("V8", 3, "|", None, ("x",), {"x": (np.dtype("O"), 0)}, 8, 1, 0), b"A" * 8),
        array_of(dtype_of("U2", 3, "<", None, None, None, 800, 4, 8), b"A" * 8),
        array_of(np.dtype("f8"), b"A" * 8, shape=(1 << 40,)),
        array_of(np.dtype("f8"), b"A" * 8, shape=(-1,)),
        Pickled(np.ndarray, ((4,), "O")),
        Pickled(SCALAR, (dtype_of("O", *PLAIN), b"A" * 8)),
        Pickled(SCALAR, (np.dtype("O"), [1])),
        Pickled(SCALAR, (np.dtype("f8"), b"A" * 4)),
        np.zeros(2, dtype=[("a", "i4"), ("b", "f8")]),
    ],
)
def test_arrays_that_numpy_would_not_have_written_never_reach_it(value: Any, tmp_path: Path) -> None:
    """NumPy follows pointers that such files contain."""
    path = tmp_path / "x.pt"
    torch.save({"fine": np.ones(2), "value": value}, path)
    with pytest.raises(SMPCheckpointError, match=r"x\.pt holds what torch's safe reader does not know"):
        read(path)


@pytest.mark.parametrize(
    "code", ["?", *"bBhHiIlLqQefdgFD", ">f8", ">U3", "S2", "M8[D]", ">m8[25s]", "M8", "U0"]
)
def test_arrays_of_all_simple_dtypes_come_back(code: str, tmp_path: Path) -> None:
    for value in (np.zeros((2, 3), dtype=code), np.zeros((0, 2), dtype=code).T, np.dtype(code)):
        found, expected = kept(value, tmp_path), pickle.loads(pickle.dumps(value, protocol=2))
        assert type(found) is type(expected)
        assert np.array_equal(found, expected)
        assert getattr(found, "dtype", found) == getattr(expected, "dtype", expected)


@pytest.mark.parametrize("named", [b"cnumpy\nndarray\n(K\x04\x85", b"cnumpy\ndtype\n("])
def test_numpys_types_are_not_made_in_the_other_way_that_pickle_has(named: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({}, path)
    replace_pickle(path, b"\x80\x02" + named + b"X\x01\x00\x00\x00Ot\x81.")  # NEWOBJ
    with pytest.raises(SMPCheckpointError, match=r"x\.pt (holds what torch's|cannot be loaded: TypeError)"):
        read(path)


def test_a_whole_file_is_written_through_a_link_as_by_torch(tmp_path: Path) -> None:
    link, folder = tmp_path / "latest.pt", tmp_path / "elsewhere"
    folder.mkdir()
    link.symlink_to("elsewhere/step_1.pt")
    for value in (1, 2):
        save({"value": value}, str(link), partial=False)
        assert link.is_symlink() and load(str(folder / "step_1.pt"), partial=False) == {"value": value}
