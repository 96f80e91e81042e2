"""Rewards: the value of a response, computed in processes that can be killed.

A reward of your own needs no change here: `reward: [{name: my/file.py:function}]`. A built-in one is a function in this
package, listed in `registry`, with its options in `rlhf/config/reward.py`. The training loop uses `scorer`, which gives
the work to `pool`; its processes (`rlhf.processes`) run `worker`. `math` grades mathematical answers, which
`rlhf.answers` compares.
"""
