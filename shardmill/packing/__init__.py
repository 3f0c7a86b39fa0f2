"""Lengths become a plan of which examples share a row."""
