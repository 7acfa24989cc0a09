"""What each setting for models that do not fit saves of a rank's memory, and what it costs of a step."""
