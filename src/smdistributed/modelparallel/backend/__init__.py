"""The package under which launchers look for exception classes."""
