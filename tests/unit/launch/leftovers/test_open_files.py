"""How many open files a job needs, beside what the system allows."""

from __future__ import annotations

import resource

import pytest

from opensmd.launch.leftovers.open_files import allow_for

NO_LIMIT = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("limits", "raised"),
    [
        ((NO_LIMIT, NO_LIMIT), False),
        ((100_000, 100_000), False),
        ((30, NO_LIMIT), True),
        ((30, 100_000), True),
    ],
)
def test_the_soft_limit_is_raised_where_it_is_too_low(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], raised: bool
) -> None:
    asked = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, wanted: asked.append(wanted))
    allow_for(8)
    if raised:
        ((soft, hard),) = asked
        assert soft > 8 * 8 and hard == limits[1]
    assert bool(asked) == raised


def test_a_hard_limit_that_is_too_low_is_said_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (30, 40))
    for ranks, who in ((1, "1 rank needs"), (8, "8 ranks need")):
        with pytest.raises(ValueError, match=rf"{who} more open files than the 40 .*\(ulimit -n 1024\)"):
            allow_for(ranks)
