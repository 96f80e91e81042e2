"""What a model acts on: tools, environment classes and coroutines, and the rollouts of several turns that they make.

    driver                                                        process that can be killed
      hosts.Hosts         one session per rollout  <── JSON ──>     serve       runs the user's code
      turns.play_turns    generate -> calls -> answers -> ...       contract    a class or functions as tools
      turns.play_coroutine   the same for `async def play`          schema, seeding

A rollout is one log of tokens (`rollout/token_log.py`): what the environment says is appended to what was sampled, and
the engine goes on from these ids.

To add a built-in environment: a class in a module of its own here, with the standard library alone, and its name in
`config/environment.py`.
"""
