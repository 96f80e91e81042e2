"""One rank of supervised fine-tuning: cross entropy of the trained tokens, by the same model and kernels as GRPO."""

from __future__ import annotations

from torch import Tensor

from rlhf.config.supervised import SFTConfig
from rlhf.learner.policy_model import check_packed, load_policy
from rlhf.learner.step import HeldMicrobatch
from rlhf.learner.supervised import SupervisedRank
from rlhf.log.reductions import Perplexity, StepMetrics
from rlhf.types import Place


class SFTTrainer(SupervisedRank):
    """The policy's rank; a plain class."""

    def __init__(self, config: SFTConfig, place: Place) -> None:
        super().__init__(config, place)
        model = config.model
        with self.loading():
            policy = load_policy(model, temperature=1.0)
        self.wrap(policy)
        check_packed(
            lambda tokens: self.deepspeed(tokens).logprobs, self.device,
            dtype=model.dtype, key="model.path", path=model.path,
        )  # fmt: skip

    def loss(self, held: HeldMicrobatch) -> tuple[Tensor, StepMetrics]:
        """The mean of -log p(token) over the trained tokens of the minibatch, nats."""
        total = -self.deepspeed(held.tokens).logprobs.sum()
        perplexity = Perplexity(total.detach().double(), held.tokens.response_mask.sum())
        return total / held.denominators.tokens, {"perplexity": perplexity}
