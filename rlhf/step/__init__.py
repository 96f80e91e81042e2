"""One training step on the driver: its flat batch, its minibatches, and rewards turned into advantages."""
