"""What every benchmark shares: starting ranks, interleaving candidates, statistics, tables and plots."""
