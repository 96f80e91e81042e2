"""Mathematical answers: extracted from a response, normalized, parsed into a tree and compared by value.

thoughts -> extract -> clean -> tokens -> tree -> compare (words, quantity, equations, region; value, arithmetic)
                                               -> evaluated (numerals), copied, curves: whether the answer is worked out

A new place where an answer stands: `extract.STEPS`, with `ExtractionStep` and `STEPS_OF_MODE` in `config/reward.py`. A
LaTeX command: `notation.COMMANDS`. A format of the answers in a data set: `extract.gold_answer` and `AnswerFormat` in
`config/data.py`.
"""
