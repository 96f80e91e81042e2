# %% [markdown]
# # A reward of your own
#
# What a reward gets and returns, how to try it, and how to measure a model with it. `make quickstart` has made the
# model and the data.

# %%
import json
import os

while not os.path.isdir("runs/quickstart-data"):  # the root of the project
    os.chdir("..")

import rlhf

with open("runs/quickstart-data/test.jsonl") as file:
    rows = [json.loads(line) for line in file][:32]
rows[0]

# %% [markdown]
# A function gets the response as text, the row's `answer`, its other `columns`, and `metadata` of the response; name
# what you read, and take the rest with `**_`. It returns a number, or a dict: `score` is the reward, other numbers are
# logged next to it. None means that it cannot judge this response, which then is left out.


# %%
def close(response: str, *, answer: str, **_: object) -> dict[str, float] | None:
    digits = "".join(letter for letter in response.rpartition("boxed")[2] if letter.isdecimal())
    if not digits:
        return {"score": 0.0, "boxed": 0.0}
    right = sum(ours == theirs for ours, theirs in zip(digits[::-1], answer[::-1], strict=False))
    return {"score": right / max(len(digits), len(answer)), "boxed": 1.0}


print(close("12 13 06 \\boxed{632}", answer="632"), close("\\boxed{682}", answer="632"), close("no", answer="632"))

# %% [markdown]
# With others, and with weights: names of built-in rewards and functions stand in one list. A function of a module is
# imported by the processes that grade; one of a notebook is sent to them. Both run confined: without network, and
# without files that are not theirs (`docs/rewards.md` says what may be granted).

# %%
reward = [{"name": close, "weight": 0.5}, "math"]
evaluation = rlhf.evaluate_model(
    model="runs/quickstart-data/model",
    data=rows,
    reward=reward,
    **{
        "cluster.device": "cpu",
        "model.dtype": "float32",
        "rollout.max_response_tokens": 24,
        "data.max_prompt_tokens": 64,
    },
)
for name, value in evaluation.metrics.items():
    print(f"{name:<32} {value:.3f}")

# %% [markdown]
# Every response, with its grades:

# %%
evaluation.responses[0]

# %% [markdown]
# `rlhf.train(..., reward=reward)` trains with it. A mistake in the function is found before anything starts: it grades
# a first response of each data set.

# %%
try:
    rlhf.train(
        model="runs/quickstart-data/model",
        data=rows,
        reward=lambda response, **_: len(responses),  # type: ignore[name-defined]  # noqa: F821
        **{"run.dir": "runs/never", "run.steps": 1, "cluster.device": "cpu", "rollout.prompts_per_step": 8},
    )
except ValueError as error:
    print(error)
