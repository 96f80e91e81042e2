"""Reads the files in the folder of a run, and makes a page that shows them."""
