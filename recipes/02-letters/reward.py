"""The reward of the recipe: partial credit."""


def in_place(response: str, *, answer: str, **_: object) -> float:
    """The fraction of the letters that stand in their place; letters too many count as wrong ones."""
    right = sum(written == wanted for written, wanted in zip(response, answer, strict=False))
    return right / max(len(response), len(answer))
