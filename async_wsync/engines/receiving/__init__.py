"""What every receiving end needs, whatever the engine."""
