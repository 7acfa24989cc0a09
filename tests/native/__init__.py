"""Unit tests of the native core, without Python and torch: small C++ programs run from pytest."""
