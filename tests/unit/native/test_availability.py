"""Who can do without the compiled core learns why there is none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from opensmd.environment.settings import Settings
from opensmd.native import availability, build
from opensmd.native.availability import core_or_reason


def test_a_core_that_is_there_needs_no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(availability.build, "load", lambda settings: build)
    assert core_or_reason(settings()) == (build, "")


def test_each_way_to_have_no_core_says_which_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(settings: Settings) -> None:
        raise build.BuildError("no compiler")

    monkeypatch.setattr(availability.build, "load", fail)
    assert core_or_reason(settings()) == (None, "no compiler")
    core, reason = core_or_reason(replace(settings(), native=False))
    assert core is None and "OPENSMD_NATIVE=0" in reason
    core, reason = core_or_reason(replace(settings(), build_error="c++ ended with 1"))
    assert core is None and "smdrun could not build it" in reason


def settings() -> Settings:
    return replace(Settings.from_environment(), native=True, build_error=None)
