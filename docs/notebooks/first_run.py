# %% [markdown]
# # A first run
#
# `make quickstart` has made a tiny model and its data in `runs/quickstart-data`: sums of two three-digit numbers. Here
# a function of this notebook grades the answers, and the model learns from it, on two CPU cores. Open this file as a
# notebook (JupyterLab with jupytext, VS Code), or run it as a script.

# %%
import json
import os

while not os.path.isdir("runs/quickstart-data"):  # the root of the project; a notebook starts in its own folder
    os.chdir("..")

import rlhf


def read(name: str) -> list[dict[str, str]]:
    with open(f"runs/quickstart-data/{name}.jsonl") as file:
        return [json.loads(line) for line in file]


# %% [markdown]
# A reward is a function of the response. `answer` is the row's; `**_` takes what it does not read.


# %%
def boxed(response: str, *, answer: str, **_: object) -> float:
    return float(response.strip().endswith(f"\\boxed{{{answer}}}"))


# %% [markdown]
# A callback sees each step. It may return further metrics, and stop the run.


# %%
class Watch:
    def __init__(self) -> None:
        self.rewards: list[float] = []
        self.last = 10**9

    def on_step(self, step: int, metrics: dict[str, float], groups: list[object]) -> dict[str, object]:
        self.rewards.append(metrics["reward/mean"])
        return {"mine/best": max(self.rewards), "stop": step >= self.last}


watch = Watch()
watch.last = 3

# %% [markdown]
# Three steps, then the callback stops the run, saved. Every key of the command line is a keyword: `rlhf grpo --help`
# lists them. The folder of the run must be new.

# %%
settings = {
    "run.dir": "runs/notebook",
    "run.steps": 20,
    "cluster.device": "cpu",
    "model.dtype": "float32",
    "rollout.max_response_tokens": 24,
    "data.max_prompt_tokens": 64,
    "learner.optimizer.lr": 5e-4,
    "evaluation.at_start": True,
}
objects = {
    "model": "runs/quickstart-data/model",
    "data": read("train"),
    "eval_data": read("test")[:64],
    "reward": boxed,
    "callbacks": watch,
}
result = rlhf.train(**objects, **settings)
print(result.finished, [row["step"] for row in result.metrics], result.metrics[-1]["mine/best"])

# %% [markdown]
# `resume=True` goes on, with the same objects. The interrupt of the notebook (Ctrl-C) would save and end the run, too.

# %%
watch.last = 6
result = rlhf.train(**objects, **settings, resume=True)

# %% [markdown]
# The result has the metrics of every step, the evaluations, and the folder of the model, once all steps are taken.

# %%
for step, values in result.evaluations.items():
    print(step, values["eval/test/avg@1"])
print(result.folder, result.model)
