"""Reads the folder of a run and writes a page about it."""
