"""One rank of a trained module: model, packed attention, update, checkpoint. `worker` trains the policy.

What a model family needs stands in `packed_attention` (masks, windows, sinks), `packed_mixers` (layers without
attention), `routing` (experts), `policy_model.logit_transform` (the head); `plan/model_shape.py` counts its parameters.
"""
