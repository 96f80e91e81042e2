r"""Mathematical answers: extracted from a response, normalized, parsed into a tree and compared by value.

thoughts -> extract -> clean -> tokens -> tree -> compare (words, quantity, equations, region; value)
                                               -> evaluated, copied: whether the answer is worked out

The package needs mpmath and nothing of the trainer:

>>> from rlhf.answers.compare import compare
>>> from rlhf.answers.extract import extract, gold_answer
>>> stated, gold = extract(r"So it is \boxed{0.5}.", ["box"]), gold_answer("Half of 1 is\n#### 1/2")
>>> stated, gold, compare(stated, gold)
('0.5', '1/2', True)

A new place where an answer stands: `extract.STEPS`, with `ExtractionStep` and `STEPS_OF_MODE` in `config/reward.py`. A
LaTeX command: `notation.COMMANDS`. A format of the answers in a data set: `extract.gold_answer` and `AnswerFormat` in
`config/data.py`.
"""
