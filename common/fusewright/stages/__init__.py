"""The stages of one graph's path, and what they hand on; `fusewright.pipeline` has them in order."""
