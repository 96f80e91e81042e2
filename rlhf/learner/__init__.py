"""One rank of a trained module: model, packed attention, update, checkpoint. `policy` trains the policy.

Support for a model family is in `packed_attention` (masks, windows, sinks), `packed_mixers` (layers without attention),
`routing` (experts) and `policy_model.logit_transform` (the head); `check/model_shape.py` counts its parameters.

Where to add: a metric of an update or a term of the loss, in `update.policy_microbatch` (critic:
`critic.value_microbatch`), computed by a function of `rlhf.algo`; a kind of reference, a class and its line in
`reference.make_reference`; an adapter, in `rank.TrainedRank.wrap`, which says what the optimizer trains and what
engines, canary and exports get.
"""
