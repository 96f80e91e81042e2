"""One rank of a trained module: model, packed attention, update, checkpoint. `worker` trains the policy.

Support for a model family is in `packed_attention` (masks, windows, sinks), `packed_mixers` (layers without attention),
`routing` (experts) and `policy_model.logit_transform` (the head); `plan/model_shape.py` counts its parameters.
"""
