"""The YAML: its keys (`sections`, `data`, `reward`), the whole config of each program, and contradictions.

Contradictions between values are found here; `rlhf/check` checks what needs a model's files or the machine.
A new key: a field of its section, with a description, and with `resume="free"` if a resumed run may change it.
"""
