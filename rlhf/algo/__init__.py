"""Pure functions of tensors and numbers: log-probs, KL, advantages, losses, Adam, schedules, packing."""
