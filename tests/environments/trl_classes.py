"""Environments and reward functions as people write them for TRL: three kinds of classes, and what judges them."""

import random
from typing import Literal

import numpy as np


class GuessTheNumber:
    """Makes its own data with the global generator, and owns its reward."""

    def reset(self, **kwargs) -> str | None:
        self._secret = random.randint(1, 100)
        self.guesses = 0
        self.reward = 0.0
        self.done = False
        return "Find the number from 1 to 100."

    def guess(self, number: int) -> str:
        """
        Guess the number.

        Args:
            number: A whole number from 1 to 100.

        Returns:
            Whether the number is higher or lower.
        """
        if self.done:
            raise ValueError("Game over.")
        self.guesses += 1
        if number == self._secret:
            self.done = True
            self.reward = 1.0 / self.guesses
            return "Correct!"
        return "higher" if number < self._secret else "lower"

    def get_reward(self) -> float:
        return self.reward


class Shop:
    """Judged by a function that reads `environments`, private attributes too."""

    PRICES = {"tea": 2, "coffee": 3}  # noqa: RUF012

    def __init__(self):
        self.made = 0

    def reset(self, prompt, budget, **kwargs):
        self.made += 1
        self._spent = 0
        self._basket = []
        self.budget = budget
        self.position = (0, 0)
        self.counts = {1: "one"}
        self.board = np.zeros(2)

    @property
    def left(self) -> int:
        return self.budget - self._spent

    def buy(self, drink: Literal["tea", "coffee"], count: int = 1) -> dict:
        """
        Buy a drink.

        Args:
            drink: What to buy.
            count: How many.
        """
        self._spent += self.PRICES[drink] * count
        self._basket.append(drink)
        return {"spent": self._spent}

    def look(self) -> list[str]:
        """Look into the basket."""
        return self._basket

    def _check(self) -> None:
        pass


class Slow:
    """Tools and reward are coroutines."""

    def reset(self, **kwargs):
        self.notes = []

    async def note(self, text: str) -> str:
        """
        Write a note.

        Args:
            text: The note.
        """
        import asyncio

        await asyncio.sleep(0.001 * (3 - len(text) % 3))
        if not text:
            raise KeyError("empty")
        self.notes.append(text)
        return f"noted {text}"

    def count(self) -> int:
        """Count the notes."""
        return len(self.notes)

    async def get_reward(self) -> float:
        return float(len(self.notes))


def spent_in_budget(environments, **kwargs) -> list[float]:
    return [float(env._spent) if env.left >= 0 else -1.0 for env in environments]


def calls_in_completions(prompts, completions, completion_ids, budget, log_metric, log_extra, **kwargs):
    log_metric("rollouts", len(prompts))
    log_extra("budget", budget)
    return [
        None if budget[i] > 50 else float(sum(len(m.get("tool_calls") or ()) for m in completions[i]))
        for i in range(len(completions))
    ]


def add(a: int, b: int) -> int:
    """
    Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b
