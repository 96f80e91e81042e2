"""The mathematics, without processes: advantages, KL, losses, log-probs, packing, Adam, schedules.

Names of values are in `rlhf/config/sections.py`. A new KL estimator: a branch in `kl`, a name in `KLEstimator`. A new
advantage: a case in `advantages.advantages_by_name`, a name in `AlgoConfig`, and in `TRAINING_CONFLICTS` of
`config/contradictions.py` if one sample of a prompt is too few. A new policy loss: a branch of `losses.policy_loss`,
its name in `PolicyLoss`, and in `TRAINING_READS_IF` at the keys that it reads; `learner/update.py` calls it. Users'
functions stand in place of both (`own_functions`). A new form of Adam: `adam`, a name in `OptimizerConfig`;
`learner/rank.py` makes the optimizer.
"""
