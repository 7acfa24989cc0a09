"""What recording a timeline costs a training step."""
