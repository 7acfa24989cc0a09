"""Launchers look for exception classes under this name."""
