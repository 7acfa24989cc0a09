"""Checkpoints: collecting parts (gather), merging them (merge), files that survive a kill, save and load."""
