"""State dicts of a split model, put together from its stages and taken apart again."""
