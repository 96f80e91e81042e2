# %% [markdown]
# # An environment of your own
#
# A model that acts before it is graded: a class with a tool, defined in a cell. `rlhf recipe 3` has made a
# model that sometimes asks a calculator, and its data: products that it cannot work out alone.

# %%
import json
import os

while not os.path.isdir("runs/tools-quickstart-data"):  # the root of the project
    os.chdir("..")

import rlhf

with open("runs/tools-quickstart-data/train.jsonl") as file:
    rows = [json.loads(line) for line in file]

# %% [markdown]
# `reset` begins a rollout; it gets the columns of the row, and may return text for the end of the prompt. Public
# methods with types and a docstring are the tools. `get_reward` judges the rollout; further numbers are logged.


# %%
class Calculator:
    def reset(self, *, answer: str, **_: object) -> None:
        self.answer, self.results = answer, list[str]()

    def calculator(self, expression: str) -> str:
        """Work out a product.

        Args:
            expression: such as 347 * 285
        """
        left, right = expression.split("*")
        self.results.append(str(int(left) * int(right)))
        return self.results[-1]

    def get_reward(self) -> dict[str, float]:
        return {"score": float(self.answer in self.results), "calls": float(len(self.results))}


# %% [markdown]
# The reward of the class and those of `reward` are added: here 1 for asking the right question, and 1 for the right
# answer in the box.

# %%
result = rlhf.train(
    model="runs/tools-quickstart-data/model",
    data=rows,
    environment=Calculator,
    reward="math",
    **{
        "run.dir": "runs/notebook-environment",
        "run.steps": 3,
        "run.max_useless_steps": None,
        "cluster.device": "cpu",
        "model.dtype": "float32",
        "data.max_prompt_tokens": 64,
        "rollout.prompts_per_step": 16,
        "rollout.max_response_tokens": 20,
        "rollout.max_rollout_tokens": 64,
        "rollout.max_turns": 3,
        "learner.optimizer.lr": 5e-4,
    },
)
for row in result.metrics:
    print(row["step"], row["reward/mean"], row["reward/part/environment"], row["reward/part/environment/calls"])
