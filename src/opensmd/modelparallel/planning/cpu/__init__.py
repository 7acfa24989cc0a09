"""What operations take on one core of a CPU: a table of rates, and what counts for it. Pure."""
