"""Decides. Pure functions over frozen values: no clock, no I/O, no randomness."""
