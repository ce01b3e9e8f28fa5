"""One update, from the source's manifest to the report."""
