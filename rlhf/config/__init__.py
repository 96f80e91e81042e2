"""The YAML: its keys (`sections`, `data`, `reward`), the whole of each program, and what contradicts.

A new key: a field of its section, with a description. If a resumed run may change it, `run/resume.py` names it.
"""
