"""Plans: a compiled graph as values and a flat list of instructions."""
