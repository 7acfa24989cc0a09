"""Another user of this machine plants and overwrites what he can: nothing of his is accepted."""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE

import pytest

from opensmd.environment import private_files
from opensmd.environment.private_files import who_else_can_change
from opensmd.environment.settings import Settings
from opensmd.legacy.rendezvous.address import Address
from opensmd.legacy.rendezvous.file import _locked, join_file
from opensmd.legacy.settings import Deadline
from opensmd.native import build, recipe
from opensmd.native.toolchain import find_compiler
from tests.faults.test_build_faults import QUICK_COMPILER
from tests.support.forks import ForkedProcess, as_main
from tests.support.namespaces import mount_over
from tests.support.patience import PATIENCE

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


BESIDE_FOREIGN_FILES = """
import os, sys
import torch, torch.distributed as dist, torch.multiprocessing as mp
from opensmd.native import build

def main(rank, store, place):
    core = build.load()
    create = core.create_arena_file
    if place == "named":
        def without_memfd(shape, named):
            if not named:
                raise RuntimeError("not allowed here")
            return create(shape, named)
        core.create_arena_file = without_memfd
    dist.init_process_group("smddp", init_method=f"file://{store}", rank=rank, world_size=2)
    total = torch.full((100_000,), rank + 1.0)
    dist.all_reduce(total)
    assert bool((total == 3).all())
    print(type(dist.group.WORLD._get_backend(torch.device("cpu"))).__name__, flush=True)
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.start_processes(main, tuple(sys.argv[1:]), nprocs=2, start_method="fork")
"""


def give_foreign_files(shm: Path = Path("/dev/shm")) -> None:
    """In a namespace of its own: what other users, other jobs and other libraries leave there."""
    mount_over(str(shm), "tmpfs", "size=64m,mode=1777")
    for name in (
        "opensmd-0000000000000000",
        "opensmd-ffffffffffffffff",
        "mpich_shar_tmpqwerty",
        "torch_7_8_9",
    ):
        (shm / name).write_text(f"not an arena: {name}")
    for name in ("opensmd-ffffffffffffffff", "mpich_shar_tmpqwerty"):
        os.chown(shm / name, NOBODY, NOBODY)
        (shm / name).chmod(0o000)
    (shm / "opensmd-folder").mkdir()
    (shm / "opensmd-link").symlink_to("/nowhere")


def files_of(shm: Path) -> dict[str, object]:
    """What is there, with its owner, its mode, and what it holds."""
    found: dict[str, object] = {}
    for path in shm.iterdir():
        status = path.lstat()
        content = path.read_text() if path.is_file() else ""
        found[path.name] = (status.st_uid, status.st_mode, content)
    return found


def run_beside_foreign_files(script: str, store: str, place: str) -> None:
    give_foreign_files()
    before = files_of(Path("/dev/shm"))
    assert len(before) == 6
    as_main(script, [store, place])
    assert files_of(Path("/dev/shm")) == before
    print("all are as they were")


@needs_root
@pytest.mark.parametrize("place", ["memfd", "named"])
def test_files_of_others_in_shared_memory_hurt_no_job_and_stay(place: str, tmp_path: Path) -> None:
    script = tmp_path / "two_ranks.py"
    script.write_text(BESIDE_FOREIGN_FILES)
    arguments = (run_beside_foreign_files, str(script), str(tmp_path / "store"), place)
    job = ForkedProcess(*arguments, cwd=tmp_path, env=dict(os.environ), stdout=PIPE, stderr=PIPE)
    out, err = job.communicate(PATIENCE)
    if "Operation not permitted" in err:
        pytest.skip("this user may not make mount namespaces")
    assert job.returncode == 0, err
    assert out.split("\n")[:2] == ["SmddpBackend"] * 2
    assert "all are as they were" in out


def fake_core(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Settings, Path]:
    """Settings with a compiler that compiles in no time, and where the library would be looked for."""
    compiler = folder / "cxx"
    compiler.write_text(QUICK_COMPILER)
    compiler.chmod(0o755)
    monkeypatch.setenv("CALLS", str(folder / "calls"))
    monkeypatch.setenv("SECONDS_A_CALL", "0")
    settings = Settings(cache_dir=folder / "cache", compiler=str(compiler))
    toolchain = find_compiler(settings.compiler)
    assert toolchain is not None
    name = f"{recipe.base_key()}-{recipe.digest([toolchain.key])[:8]}"
    return settings, settings.cache_dir / name / f"{build.MODULE}.so"


@needs_root
@pytest.mark.parametrize("what", ["the library", "its folder", "an object", "a mode"])
def test_a_planted_library_is_not_loaded_but_built_anew(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, library = fake_core(tmp_path, monkeypatch)
    assert build.build(settings) == library
    objects = sorted((settings.cache_dir / "objects").iterdir())
    planted = {"its folder": library.parent, "an object": objects[0]}.get(what, library)
    if what == "a mode":
        planted.chmod(0o666)
    else:
        os.chown(planted, NOBODY, NOBODY)
    if what == "an object":
        library.unlink()
        library.parent.rmdir()
        assert build.build(settings) == library
        assert objects[0].stat().st_uid == 0
        return
    library.write_text("planted")
    if what == "the library":
        os.chown(library, NOBODY, NOBODY)
    assert build.build(settings) == library
    assert library.read_text() == "built\n"
    assert who_else_can_change(library) is None


@needs_root
@pytest.mark.parametrize("what", ["owner", "mode", "a folder above", "a link"])
def test_a_cache_that_others_can_write_to_is_left_for_a_private_one(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, library = fake_core(tmp_path, monkeypatch)
    monkeypatch.setattr(private_files.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(private_files.pwd, "getpwuid", no_name)
    library.parent.mkdir(parents=True)
    library.write_text("planted")
    cache = settings.cache_dir
    if what == "owner":
        os.chown(cache, NOBODY, NOBODY)
    elif what == "mode":
        cache.chmod(0o777)
    elif what == "a folder above":
        settings = replace(settings, cache_dir=library.parent)
        cache.chmod(0o777)
    else:
        settings = replace(settings, cache_dir=tmp_path / "link")
        settings.cache_dir.symlink_to(cache)
        os.lchown(settings.cache_dir, NOBODY, NOBODY)
    with pytest.warns(RuntimeWarning, match="compiled code is not kept in .*OPENSMD_CACHE_DIR"):
        built = build.build(settings)
    assert built.read_text() == "built\n"
    assert built.parent.parent == tmp_path / "opensmd-0"
    assert library.read_text() == "planted"


def test_where_the_home_folder_cannot_be_written_to_the_core_is_compiled_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, _ = fake_core(tmp_path, monkeypatch)
    monkeypatch.setattr(private_files.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(private_files.pwd, "getpwuid", no_name)
    settings = replace(settings, cache_dir=Path("/proc/opensmd"))  # not even root can make folders there
    with pytest.warns(RuntimeWarning, match="it cannot be made .*OPENSMD_CACHE_DIR"):
        built = build.build(settings)
    assert built.parent.parent == tmp_path / f"opensmd-{os.geteuid()}"


def no_name(user: int) -> None:
    """As for a user that is not on record."""
    raise KeyError(user)


def test_folders_and_files_of_the_cache_are_for_their_user_alone_under_any_umask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, library = fake_core(tmp_path, monkeypatch)
    settings = replace(settings, cache_dir=tmp_path / "home" / ".cache" / "opensmd")
    before = os.umask(0)
    try:
        library = build.build(settings)
    finally:
        os.umask(before)
    for folder in (settings.cache_dir, *list(settings.cache_dir.parents)[:2]):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert who_else_can_change(library) is None


def test_a_lock_file_that_is_a_link_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, library = fake_core(tmp_path, monkeypatch)
    precious = tmp_path / "precious"
    precious.write_text("results")
    settings.cache_dir.mkdir()
    (settings.cache_dir / f"{library.parent.name}.lock").symlink_to(precious)
    with pytest.raises(build.BuildError, match="OPENSMD_CACHE_DIR"):
        build.build(settings)
    assert precious.read_text() == "results"


def test_a_rendezvous_file_that_is_a_link_or_anothers_is_not_touched(tmp_path: Path) -> None:
    precious, link, planted = tmp_path / "precious", tmp_path / "link", tmp_path / "planted"
    precious.write_text("")
    link.symlink_to(precious)
    planted.write_text("")
    planted.chmod(0o666)
    with pytest.raises(ValueError, match="it is a link, which is not followed"):
        meet(link)
    with pytest.raises(ValueError, match="all may write to it"):
        meet(planted)
    if os.geteuid() == 0:
        planted.chmod(0o644)
        os.chown(planted, NOBODY, NOBODY)
        with pytest.raises(ValueError, match=f"belongs to user {NOBODY}"):
            meet(planted)
    assert precious.read_text() == planted.read_text() == ""


def test_a_rendezvous_file_is_its_users_alone_under_any_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with _locked(str(tmp_path / "meet"), Deadline(PATIENCE)):
            assert stat.S_IMODE((tmp_path / "meet").stat().st_mode) == 0o600
    finally:
        os.umask(before)


def meet(path: Path) -> None:
    join_file(
        Address("file", path=str(path)),
        rank=0,
        world_size=1,
        group_name="",
        interface=None,
        deadline=Deadline(PATIENCE),
    )
