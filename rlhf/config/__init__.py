"""The YAML: its keys (`sections`, `data`, `reward`), the whole config of each program, and contradictions.

A new key: a field of its section, with a description, and with `resume="free"` if a resumed run may change it.
"""
