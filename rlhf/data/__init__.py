"""Rows to prompts: files and hub data sets, templates, answers, order; and the models' files."""
