"""The engine and its requests: token ids in, completions out; the token log of a rollout; messages; the endpoint."""
