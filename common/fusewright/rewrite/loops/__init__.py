"""Loops over time steps that Dynamo has unrolled."""
