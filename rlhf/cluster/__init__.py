"""Ray: actors and where they are placed, calls on all ranks, engines that are replaced, the canary, checkpoints."""
