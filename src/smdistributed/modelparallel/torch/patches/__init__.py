"""The place of activation checkpointing in later versions of the library."""
