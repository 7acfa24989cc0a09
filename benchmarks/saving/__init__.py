"""How long training stands still for a save beside it, and what it loses in all."""
