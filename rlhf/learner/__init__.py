"""One rank of a trained module: model, packed attention, update, checkpoint. The policy is `worker`, the critic `critic`."""
