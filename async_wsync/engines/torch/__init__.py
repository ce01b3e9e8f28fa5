"""Ray actors with a torch model of their own."""
