"""Rewriting: an engine for rules as data, and the rules."""
