"""From prompts to graded groups: the rollout worker, and the buffer with its staleness rule.

The path of a group with one turn; with rollout workers as actors, `cluster/dispatch.py` carries prompts and groups.

    RolloutLoop.take_groups                    run/rollout_loop.py       the training step waits here
      Stop.unless_requested                    run/stop.py
        RolloutBuffer.take > dispatch > _run   rollout/buffer.py         one task per prompt
          RolloutWorkers.rollout_group         cluster/rollout_workers.py
            RolloutWorker.rollout_group        rollout/worker.py
              _respond
                EngineChoice.generate          cluster/engine_choice.py
                  HostedAsyncActor.call        cluster/actors.py         in the engine's process
                    RolloutEngine.generate > _run    sampling/engine.py  vLLM
              to_rollout > TokenLog.add_sampled      sampling/token_log.py
              grade > Scorer.score_group       rewards/scorer.py         processes of the graders
          RewardOutcomes.check                 run/reward_outcomes.py    the driver's account

With an environment, `_play_all > play` (worker.py), `play_turns > _turns` (environments/turns.py) and `next_turn_of`
(worker.py) stand in place of `_respond`: model and environment take turns there. `rlhf.environments` explains how to
add an environment, `rlhf.rewards` how to add a reward.
"""
