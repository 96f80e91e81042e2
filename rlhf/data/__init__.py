"""Rows to prompts: files and hub data sets, templates, answers, order; and the models' files.

A new file format: `read`, and its suffix in `config/data.py`.
"""
