"""Sums over two hosts, two network namespaces of this machine with a slow cable between them."""
