"""Turns rows into prompts: files and hub data sets, templates, answers, order; also reads the models' files.

To add a file format, change `read`, and list its suffix in `config/data.py`.
"""
