"""One rank of a trained module: model, packed attention, update, checkpoint. `worker` trains the policy."""
