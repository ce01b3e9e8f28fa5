"""vLLM, as a server and as a Ray actor."""
