"""Sizes of tiles and buffers, which --plan also reads, so this file imports nothing."""

# The budget of a microbatch counts computed tokens, and so a shared beginning once. Counted in each sequence, the
# tokens are at most this many times the budget, because attention holds keys and values for all of them.
WHOLE_TOKENS = 4

# Tokens x vocabulary of a tile of logits. On CPU a tile should fit the caches; on GPU a single tile of tokens avoids
# sums over several tiles.
HEAD_TILE = {"cuda": (16384, 4096), "cpu": (1024, 2048)}

# Tokens of a tile of an MLP. On GPU products of so many rows run at their full rate, and few bytes are moved to add up
# the gradients of weights over the tiles (benchmarks/roofline.py: 3% of an update). On CPU rows are shorter.
MLP_TILE = {"cuda": 4096, "cpu": 1024}

# Elements that GPUs reduce at once, and that ZeRO-3 gathers ahead: about one layer of a 7 B model.
REDUCE_BUCKET = 250_000_000

# Bytes of a weight transfer sent at once.
BUCKET_BYTES = 256 * 2**20

# A transfer of what has changed takes this for each bfloat16 element: its value, and its place in a block. If more than
# the second number of all elements have changed, it would hardly be smaller than everything.
BYTES_PER_CHANGE, MOST_CHANGED = 4, 0.4
