"""The stages that a graph passes through, and what they share; `fusewright.pipeline` lists them in order."""
