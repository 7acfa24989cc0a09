"""Puts the core that ``release/wheel.py`` compiled into its wheel; all else is in pyproject.toml."""

from __future__ import annotations

import os
import shutil

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

CORE = os.environ.get("OPENSMD_WHEEL_CORE")  # a folder to lay over the packages
TORCH = os.environ.get("OPENSMD_WHEEL_TORCH", "")  # the version of torch that it was compiled for


class BuildWithCore(build_py):
    """The packages, and the core among them."""

    def run(self) -> None:
        """Copy all files."""
        super().run()
        assert CORE is not None
        shutil.copytree(CORE, self.build_lib, dirs_exist_ok=True)


class WheelForOneTorch(bdist_wheel):
    """A wheel for one Python and one kind of machine, named after its torch."""

    def finalize_options(self) -> None:
        """Say that the wheel holds compiled code."""
        super().finalize_options()
        self.root_is_pure = False
        self.build_number = f"1torch{TORCH.replace('+', '')}"


setup(cmdclass={"build_py": BuildWithCore, "bdist_wheel": WheelForOneTorch} if CORE else {})
