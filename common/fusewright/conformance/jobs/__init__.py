"""Jobs, the processes that do them, and a whole run."""
