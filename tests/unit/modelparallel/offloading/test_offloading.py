"""Where offloaded activations go, and what is said of a folder that cannot take them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from opensmd.modelparallel.offloading.offloading import Offloading


def test_a_folder_that_cannot_take_activations_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Offloading(1, str(tmp_path))
    monkeypatch.setattr(os, "access", lambda path, mode: mode == os.R_OK)  # root may write everywhere
    for folder, why in ((tmp_path, "this process may not write there"), (tmp_path / "x", "there is no such")):
        monkeypatch.setenv("OPENSMD_OFFLOAD_DIR", str(folder))
        with pytest.raises(ValueError, match=f"OPENSMD_OFFLOAD_DIR='{folder}': {why}"):
            Offloading.asked_for(1)
