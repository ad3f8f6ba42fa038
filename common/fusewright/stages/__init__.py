"""The stages that a graph passes through, and what they share; `rounds` lists them in order."""
