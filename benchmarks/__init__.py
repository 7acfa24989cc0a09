"""One folder a claim; each is run by ``python -m benchmarks.NAME`` from the root of the repository."""
