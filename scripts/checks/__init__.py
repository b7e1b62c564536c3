"""Checks of what a test cannot have everywhere."""
