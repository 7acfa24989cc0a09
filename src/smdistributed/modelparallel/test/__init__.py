"""The place of the original library's own test helpers."""
