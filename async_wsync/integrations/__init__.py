"""Other frameworks' own ways to update weights, made safe to fail."""
