"""One rank of a trained module: model, packed attention, update, checkpoint. `worker` trains the policy.

What a model family needs stands in `attention` (masks, windows, sinks), `mixers` (layers without attention), `routing`
(experts) and `policy_model.logit_transform` (the head).
"""
