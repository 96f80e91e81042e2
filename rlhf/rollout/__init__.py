"""Prompts to graded groups: the engine, what it is asked for, the sampler, and the buffer with its rule of staleness.

A rollout of several turns is several calls of the sampler's `generate`, each of which goes on from the token ids so
far; `grade` then gets the whole rollout. Where to add an environment: `rlhf.environments` says.
"""
