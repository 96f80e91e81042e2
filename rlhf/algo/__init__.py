"""The mathematics, without processes: advantages, KL, losses, log-probs, packing, Adam, schedules.

A new KL estimator: a branch in `kl`, and its name in `KLEstimator` of `rlhf/config/sections.py`. A new form of Adam:
`optim`, and its name in `OptimizerConfig` there; `learner/rank.py` makes the optimizer.
"""
