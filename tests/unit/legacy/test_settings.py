"""Settings of the old interface come from the environment."""

from __future__ import annotations

import pytest

from opensmd.legacy.settings import LegacySettings


def test_settings_come_from_the_environment_with_defaults() -> None:
    assert LegacySettings.from_environment({}) == LegacySettings(1800.0, None, "auto")
    given = {
        "OPENSMD_LEGACY_TIMEOUT": "2.5",
        "OPENSMD_LEGACY_INTERFACE": "eth0",
        "OPENSMD_LEGACY_ENGINE": "gloo",
    }
    assert LegacySettings.from_environment(given) == LegacySettings(2.5, "eth0", "gloo")
    for name, value in (("TIMEOUT", "soon"), ("TIMEOUT", "0"), ("TIMEOUT", "nan"), ("ENGINE", "steam")):
        with pytest.raises(ValueError, match=f"OPENSMD_LEGACY_{name}='{value}'"):
            LegacySettings.from_environment({f"OPENSMD_LEGACY_{name}": value})
