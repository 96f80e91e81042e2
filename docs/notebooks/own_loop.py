# %% [markdown]
# # A loop of your own
#
# `rlhf.Trainer` is the run of `rlhf grpo` with the loop left to you: which prompts, which groups are trained, with
# which advantages. `make quickstart` has made the model and the data.

# %%
import os

while not os.path.isdir("runs/quickstart-data"):  # the root of the project
    os.chdir("..")

import torch

import rlhf

trainer = rlhf.Trainer(
    "configs/quickstart.yaml",
    **{
        "run.dir": "runs/notebook-loop",
        "run.steps": 4,
        "rollout.prompts_per_step": 16,
        "learner.schedule.warmup_steps": 2,
        "evaluation.every": None,
    },
)
trainer.open()  # in a script: with rlhf.Trainer(...) as trainer
trainer.step, len(trainer.prompts)

# %% [markdown]
# An advantage of your own: the reward without the mean of its group, not divided by the std. It gets the rewards of all
# rollouts [R] and the group of each [R].


# %%
def centred(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    sums = torch.zeros(int(groups.max()) + 1, dtype=rewards.dtype)
    counts = sums.clone().index_add(0, groups, torch.ones_like(rewards))
    return rewards - (sums.index_add(0, groups, rewards) / counts.clamp(min=1))[groups]


# %% [markdown]
# Two steps as `rlhf grpo` takes them: whole, graded groups; an update; new weights to the engines, which then have to
# give the learner's log-probs.

# %%
while trainer.step < 2:
    groups = trainer.sample(trainer.next_prompts())
    report = trainer.update(groups, advantages=centred)
    metrics = trainer.publish()
    print(report.step, report.taken, metrics["reward/mean"])

# %% [markdown]
# A step with rollouts and rewards of your own. Responses are generated without grading, and become groups with the
# rewards that you give. What is not trained has to be dropped by name: nothing is lost in silence.

# %%
prompts = trainer.next_prompts(8)
size = trainer.config.rollout.samples_per_prompt
own = []
for prompt, rollouts in zip(prompts, trainer.generate(prompts, samples=size), strict=True):
    rewards = [float(prompt.answer in sample.text) + len(sample.text) / 1000 for sample in rollouts]
    own.append(trainer.group(prompt, rollouts, rewards))
trainer.drop(own[6:])
trainer.update(own[:6])
trainer.publish()["account/filtered"]

# %% [markdown]
# Log-probs of any tokens, by the current weights; an evaluation; a checkpoint, from which `resume=True` goes on; a
# model.

# %%
sample = own[0].samples[0].rollout
prompt_ids = own[0].prompt.token_ids
(logprobs,) = trainer.logprobs([(prompt_ids, sample.sequences[0].token_ids[len(prompt_ids) :])])
print(logprobs, trainer.evaluate()["eval/test/avg@1"])
print(trainer.save(), trainer.save("runs/notebook-model"))
trainer.close()
