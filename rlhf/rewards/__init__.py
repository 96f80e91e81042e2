"""Rewards: the value of a response, computed in processes that can be killed.

The training loop uses `scorer`. `pool` and `worker` run the rewards that `named` lists; to add a reward, add it there
and its options to `rlhf/config/reward.py`. `math` grades mathematical answers, which `answers` compares.
"""
