"""SGLang, over HTTP and as a Ray actor."""
