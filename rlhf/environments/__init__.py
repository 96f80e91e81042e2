"""Tools, environment classes, coroutines and programs, and the rollouts of several turns that they drive.

    driver                                                        process that can be killed
      hosts.Hosts               one session per rollout  <── JSON ──>   serve      runs the user's code
      turns.play_turns          generate -> calls -> answers -> ...     contract   a class or functions as tools
      branches.play_coroutine   coroutines and programs                 schema, seeding

A rollout is one log of tokens (`sampling/token_log.py`): the environment's answers are appended to the sampled tokens,
and the engine continues from these ids.

To add a built-in environment, write a class in its own module here, with only the standard library, and add its name to
`config/environment.py`.
"""
