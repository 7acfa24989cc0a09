"""Every way to share a model out among ranks, together with every precision, against one process."""
