"""Rewards: what a response is worth, computed in processes that can be killed.

`scorer` is what the training loop uses, `pool` and `worker` run the rewards that `named` lists, `math` grades answers
with the help of `answers`.
"""
