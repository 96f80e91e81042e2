"""Mathematical answers: found in a response, spelled one way, read into a tree, compared by value.

extract -> clean -> tokens -> tree -> compare (words, quantity, equations, region; value, arithmetic) -> symbolic
"""
