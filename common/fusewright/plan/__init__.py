"""Plans: a compiled graph as slots and a flat list of instructions."""
