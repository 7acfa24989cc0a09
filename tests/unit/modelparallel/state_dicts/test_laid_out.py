"""State that was loaded lies in memory as its parameter does, and keeps no more than itself."""

from __future__ import annotations

from typing import Any

import torch

from opensmd.modelparallel.state_dicts.laid_out import lay_out_state


def test_turned_state_and_views_of_more_become_like_their_parameter() -> None:
    plain, images = torch.randn(4, 4), torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    slices, turned, loaded = torch.randn(4, 8)[:, 4:], torch.randn(4, 4).t(), torch.randn(2, 3, 4, 4)
    fitting, count = torch.randn(4, 4), torch.tensor(3.0)
    entries: dict[Any, Any] = {
        plain: {"slice": slices, "turned": turned, "fitting": fitting, "step": count, "name": "x"},
        images: {"moment": loaded},
        "rounds": 7,
        "last": {"value": turned},
    }
    lay_out_state(entries)
    own = entries[plain]
    for found, wanted, parameter in (
        (own["slice"], slices, plain),
        (own["turned"], turned, plain),
        (entries[images]["moment"], loaded, images),
    ):
        assert torch.equal(found, wanted) and found.stride() == parameter.stride()
        assert found.untyped_storage().nbytes() == found.nbytes
    assert own["fitting"] is fitting and own["step"] is count and own["name"] == "x"
    assert entries["rounds"] == 7 and entries["last"]["value"] is turned
