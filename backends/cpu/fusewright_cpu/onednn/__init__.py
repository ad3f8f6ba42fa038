"""Lowerings of CPU backends to the oneDNN that torch includes."""
