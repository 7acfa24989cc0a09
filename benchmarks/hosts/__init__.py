"""Collectives between hosts, network namespaces of this machine with slow cables between them."""
