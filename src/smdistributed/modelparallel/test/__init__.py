"""The package in which the original library has its own test helpers."""
