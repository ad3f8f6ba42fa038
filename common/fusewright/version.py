"""The version of every package of the family."""

__version__ = "0.1.0"
