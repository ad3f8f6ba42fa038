"""Jobs, the processes that run them, and a whole run."""
