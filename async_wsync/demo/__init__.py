"""The demo: a small transformer trains on real text while Ray engines generate with every version of it."""
