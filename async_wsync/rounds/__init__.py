"""Several sources, one update."""
