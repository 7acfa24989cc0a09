"""What a mask and a container's quota allow."""

from __future__ import annotations

from pathlib import Path

import pytest

from opensmd.cpus import cores_at_once, cpu_quota


def test_a_quota_allows_whole_cores_and_at_least_one() -> None:
    assert [cores_at_once(range(4), quota) for quota in (None, 8.0, 2.5, 0.5)] == [4, 4, 2, 1]


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({"cpu.max": "max 100000"}, None),
        ({"cpu.max": "150000 100000"}, 1.5),
        ({"cpu.max": "nonsense"}, None),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "250000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2.5),
        ({"cpu/cpu.cfs_quota_us": "250000\n"}, None),
        ({}, None),
    ],
)
def test_a_containers_quota_is_read(files: dict[str, str], cpus: float | None, tmp_path: Path) -> None:
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert cpu_quota(tmp_path) == cpus
