"""Mathematical answers: extracted from a response, normalized, parsed into a tree and compared by value.

extract -> clean -> tokens -> tree -> compare (words, quantity, equations, region; value, arithmetic) -> symbolic
"""
