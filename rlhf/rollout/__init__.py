"""From prompts to graded groups: the engine and its requests, the sampler, and the buffer with its staleness rule.

A rollout of several turns is several calls of the sampler's `generate`, each of which continues the token ids so far;
`grade` then gets the whole rollout. `rlhf.environments` explains how to add an environment.
"""
