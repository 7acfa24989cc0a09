"""Where later versions of the library have activation checkpointing."""
