"""Proof that the engines hold the learner's weights: both score the same sequences at temperature 1.

The sequences are prompts of the run, each with a response that the first engine samples at start-up. Two correct
implementations of a bfloat16 model differ by its rounding, which depends on the model: the mean |log-prob difference|
is 0.002 with 1 M parameters, 0.04 to 0.08 with 135 M in 30 layers. So the learner scores the sequences in its own type
and in float32, and an engine may differ from the float32 pass by NOISE_FACTOR times the learner's own difference.

One update at lr 1e-6 is far below that rounding: an engine that silently keeps an old tensor would agree with the
learner for many steps. So at start-up every tensor is perturbed once, a block of consecutive tensors at a time; the
engines must follow each block, and then get the true weights back. All tensors at once would not do: the late layers
would attend to noise, and an old query projection in them would not be seen. Later the canary runs after every
transfer; the float32 pass is made again where the difference is larger than the rounding at the start explains.

An engine scores given sequences in one pass. Sampling uses more, which a sleep may break alone: caches of states, what
kernels for single tokens keep outside of weights and buffers, captured graphs. So on shared GPUs every engine also
samples after its first sleeps, and the learner scores what it sampled.

These sequences are short, the rollouts of a step are not, and their log-probs are known on both sides anyway. So
`check_rollouts` compares policy/engine_kl, by the position of tokens in their sequences, with the measured rounding.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from rlhf.cluster.actors import ClusterError
from rlhf.cluster.engines import Engines
from rlhf.log.reductions import ENGINE_KL_FROM, Mean, StepMetrics, merge_metrics
from rlhf.sampling.requests import Completion, SamplingSettings, request_seed
from rlhf.sampling.token_log import TokenLog
from rlhf.types import Prompt, TokenSequence

SEQUENCES = 8
CANDIDATES = 64  # prompts; the shortest of them are taken
PROMPT_TOKENS, RESPONSE_TOKENS = 128, 64
# If engines return the support of each token, responses are sampled from this many most probable tokens: the support of
# a whole vocabulary would be 0.6 MB per token. The compared log-probs are normalized over the whole vocabulary.
TOP_K = 64
# An engine's distance from the float32 pass divided by the learner's, on SmolLM2-135M in bfloat16: 0.8 to 1.2 measured
# for a correct engine, 4.7 or more for one with a single old tensor, 4 or more at temperature 0.9 or 1.1.
NOISE_FACTOR = 2.5
LATER_FACTOR = 3.0  # after a transfer, without a float32 pass: both sides round, and the noise itself may grow
TOLERANCE = 1e-3  # the smallest bound, and the one of float32, where correct engines differ by 2e-5
BLOCK_TENSORS = 36  # perturbed at a time; about four layers
# A KL grows with the square of a difference. The mean over MIN_TOKENS is precise enough even for a tenth of the bound.
KL_FACTOR = LATER_FACTOR**2
MIN_TOKENS = 1024
LAG_FACTOR = 4.0  # with a policy lag the policy moves between sampling and training; no position moves this much more
MOVED_FAR = 0.05  # nats per token; if the policy moves further, importance weights no longer correct it
FAR = 1e6  # logged in place of NaN and infinity
# Mean |log-prob difference|, nats, that arguments in rollout.engine may cost: the importance weights of most tokens are
# then between 0.8 and 1.25.
ENGINE_LIMIT = 0.2
MOVED = 5.0  # the perturbation must move log-probs by this many tolerances, or following it would prove nothing
SLEEP_REMEDY = (
    "The engine agrees on given sequences, so a sleep broke what only sampling uses, or kernels for single tokens "
    "compute something else. Set cluster.placement=separate, where engines never sleep, or try "
    "rollout.enforce_eager=true, which captures no graphs."
)

Logprobs = Sequence[np.ndarray]


class Canary:
    """Fixed sequences, judged by the mean absolute log-prob difference between learner and each engine.

    Call `measure_noise` first, then `check_start`.

    Args:
        own_options: the engines have arguments of rollout.engine, such as fp8, whose rounding is measured at the start
            and added to what an engine may differ by.
        return_support: the engines return the tokens that each token was sampled from.
    """

    def __init__(
        self,
        engines: Engines,
        prompts: Sequence[Prompt],
        *,
        dtype: str,
        max_tokens: int,
        noise_seed: int | None = None,
        own_options: bool = False,
        return_support: bool = False,
    ) -> None:
        self.sequences: list[np.ndarray] = []
        self.tolerance = TOLERANCE  # after transfers
        self.kl_bound = TOLERANCE**2  # of rollouts at temperature 1
        self._engines, self._rounds, self._noise_seed = engines, dtype != "float32", noise_seed
        self._top_k = TOP_K if return_support else None
        self._limit = ENGINE_LIMIT if own_options else 0.0
        self._engine_noise = 0.0  # the rounding error of the options of rollout.engine
        self._rollouts: StepMetrics = {}  # KL by position, collected until there are MIN_TOKENS
        self._max_tokens = max_tokens - 1  # an engine scores a sequence while it samples one more token
        self._prompts = sorted(prompts[:CANDIDATES], key=lambda prompt: len(prompt.token_ids))[:SEQUENCES]

    async def measure_noise(self) -> None:
        """Sample the sequences, and measure the rounding error with the weights of model.path, which both sides have.

        ClusterError if learner and engine differ by more than rounding, or the run cannot be deterministic.
        """
        sampled = await asyncio.gather(*(self._sample_response(prompt) for prompt in self._prompts))
        self.sequences = [np.concatenate([start, completion.token_ids]) for start, completion in sampled]
        if self._noise_seed is not None:
            _check_alike(sampled[0][1], (await self._sample_response(self._prompts[0]))[1])
        problem = "and the learner disagree on the untouched weights of model.path: one of them computes another model"
        measured = await self._judge(await self._engine_logprobs(), problem, limit=self._limit)
        if self._limit:
            self._engine_noise = measured
            self.tolerance = max(self.tolerance, LATER_FACTOR * measured)

    async def _judge(self, by_engine: Sequence[Logprobs], problem: str, *, limit: float = 0.0) -> float:
        """The engines' difference from the learner's float32 pass; ClusterError if it exceeds rounding and `limit`.

        The bounds of later checks follow from this measurement.
        """
        exact, rounded = await self._exact_and_rounded()
        noise = max(_difference(exact, rounded)[0], self._engine_noise)
        difference = _compare(exact, by_engine, problem, max(TOLERANCE, NOISE_FACTOR * noise, limit))
        kl = max([_kl(exact, rounded), *(_kl(engine, exact) for engine in by_engine if self._limit)])
        self.tolerance = max(self.tolerance, LATER_FACTOR * noise)
        self.kl_bound = max(self.kl_bound, KL_FACTOR * kl)
        return difference

    async def check_start(self, version: int) -> dict[str, float]:
        """Send perturbed weights, check that the engines follow, and send the true ones; metrics, errors as of `check`.

        Where engines sleep they did so for each transfer, so what they sample is checked too.
        """
        true = await self._learner_logprobs()
        names = (await self._engines.learners.call(lambda learner: learner.tensor_names()))[0]
        blocks = np.array_split(np.arange(len(names)), -(-len(names) // BLOCK_TENSORS))
        for block in blocks:
            await self._check_block(version, true, int(block[0]), int(block[-1]) + 1, names)
        await self._engines.send_weights(version)
        metrics = await self.check(version)
        if self._engines.sleeps:
            metrics["sync/sampled_difference"] = await self.check_sampled(version)
        return metrics

    async def _check_block(self, version: int, true: Logprobs, start: int, stop: int, names: list[str]) -> None:
        what = f"{names[start]} to {names[stop - 1]}"
        await self._engines.learners.call(lambda learner: learner.perturb_weights(start, stop))
        try:
            exact, rounded = await self._exact_and_rounded()
            bound = self._bound(exact, rounded)
            moved, _ = _difference(true, exact)
            if not moved >= MOVED * bound:
                raise ClusterError(
                    f"canary: perturbing {what} moved log-probs by {moved:.2g} only, too little against the "
                    f"tolerance of {bound:.2g}. The model's head may be constant; its weights cannot be verified."
                )
            await self._engines.send_weights(version)
            problem = f"does not hold the perturbed weights at start-up, {what}"
            _compare(exact, await self._engine_logprobs(), problem, bound)
        finally:
            await self._engines.learners.call(lambda learner: learner.restore_weights())

    async def check(self, version: int) -> dict[str, float]:
        """Compare after a transfer, for metrics; raises ClusterError that names the worst token and both values.

        Rounding errors grow if training makes the model more sensitive to them. So a difference above the tolerance is
        judged as at the start, by the rounding error of the present weights, and the tolerance follows.
        """
        expected, by_engine = await asyncio.gather(self._learner_logprobs(), self._engine_logprobs())
        problem = f"does not hold the weights of version {version}"
        try:
            difference = _compare(expected, by_engine, problem, self.tolerance)
        except ClusterError:
            if not self._rounds:
                raise
            difference = await self._judge(by_engine, problem)
            if await self._engines.wake_if_asleep(version):
                difference = _compare(expected, await self._engine_logprobs(), problem, self.tolerance)
        return {"sync/canary_difference": difference, "sync/canary_tolerance": self.tolerance}

    async def check_sampled(self, version: int) -> float:
        """Let every engine sample, and compare the log-probs of its tokens with the learner's; errors as of `check`.

        Call it with engines that are awake, after `check`. Returns the largest difference.
        """
        requests = [self._request(prompt, whole=True) for prompt in self._prompts]
        by_prompt = await asyncio.gather(*(self._engines.group.call(ask) for _, ask in requests))
        differences = []
        for engine, responses in enumerate(zip(*by_prompt, strict=True)):
            pairs = zip(requests, responses, strict=True)
            rows = [_row(beginning, completion) for (beginning, _), (completion,) in pairs]
            differences.append(await self._check_rows(engine, rows))
        await self._engines.wake_if_asleep(version)
        return max(differences)

    async def _check_rows(self, engine: int, rows: Sequence[TokenSequence]) -> float:
        reported = _sampled_part(rows, [row.rollout_logprobs for row in rows])
        problem = "sampled tokens after a sleep, and gave them other log-probs than the learner computes"

        def judge(expected: Logprobs, bound: float) -> float:
            return _check_engine(engine, expected, reported, problem, bound, SLEEP_REMEDY)

        try:
            return judge(await self._learner_logprobs(rows), self.tolerance)
        except ClusterError:
            if not self._rounds:
                raise
        exact, rounded = await self._exact_and_rounded(rows)
        return judge(exact, max(self.tolerance, self._bound(exact, rounded)))  # these may be few tokens

    def check_rollouts(self, metrics: StepMetrics, *, temperature: float, max_lag: int) -> dict[str, float]:
        """The KL between engines and learner on trained rollouts, divided by the bound that rounding explains.

        With a policy lag, later positions are compared with the first ones: the policy has moved everywhere.
        Of the metrics of a step, those in ENGINE_KL_FROM are read. Returns policy/engine_kl_excess of the worst
        positions; empty until some have MIN_TOKENS.
        """
        by_position = {name: metrics[name] for name in ENGINE_KL_FROM.values() if name in metrics}
        self._rollouts = merge_metrics([self._rollouts, by_position])
        seen = {
            name: metric.value() for name, metric in self._rollouts.items() if cast(Mean, metric).weight >= MIN_TOKENS
        }
        self._rollouts = {name: metric for name, metric in self._rollouts.items() if name not in seen}
        if not seen:
            return {}
        bound = self.kl_bound / min(1.0, temperature) ** 2  # dividing the logits also divides their rounding error
        bounds = dict.fromkeys(seen, bound)
        if max_lag:
            first = next(iter(seen))
            bounds = {name: bound + LAG_FACTOR * seen[first] for name in seen} | {first: max(bound, MOVED_FAR)}
        ratios = [kl / bounds[name] for name, kl in seen.items()]
        return {"policy/engine_kl_excess": max(ratio if ratio < FAR else FAR for ratio in ratios)}  # NaN is far

    def _request(self, prompt: Prompt, *, whole: bool = False) -> tuple[np.ndarray, Callable[[Any], Any]]:
        """The beginning of a prompt, and the call of an engine that samples one response to it.

        `whole`: the response goes on after an end, so that all engines sample equally many tokens.
        """
        beginning = prompt.token_ids[: min(PROMPT_TOKENS, self._max_tokens - 1)]
        length = min(RESPONSE_TOKENS, self._max_tokens - len(beginning))
        settings = SamplingSettings(1.0, length, top_k=self._top_k, whole=whole)
        seed = request_seed(self._noise_seed, prompt)
        return beginning, lambda engine: engine.generate(beginning, settings, 1, seed)

    async def _sample_response(self, prompt: Prompt) -> tuple[np.ndarray, Completion]:
        """The beginning of a prompt, and a response to it that the first engine samples."""
        beginning, ask = self._request(prompt)
        (completion,) = await self._engines.group.call_one(0, ask, what=f"sampling {prompt.id}")
        return beginning, completion

    async def _learner_logprobs(
        self, rows: Sequence[TokenSequence] | None = None, *, in_float32: bool = False
    ) -> Logprobs:
        """Of the canary's sequences; or of the sampled tokens of rows, each among the tokens of its support."""
        learners = self._engines.learners
        if rows is None:
            by_rank = await learners.call(lambda learner: learner.canary(self.sequences, in_float32))
            return by_rank[0]
        sequences, supports = [row.token_ids for row in rows], [row.support for row in rows]
        by_rank = await learners.call(lambda learner: learner.canary(sequences, in_float32, 1.0, supports))
        return _sampled_part(rows, by_rank[0])

    async def _engine_logprobs(self) -> list[Logprobs]:
        return await self._engines.group.call(lambda engine: engine.canary(self.sequences))

    async def _exact_and_rounded(self, rows: Sequence[TokenSequence] | None = None) -> tuple[Logprobs, Logprobs]:
        """The learner's log-probs in float32, and those in its own type."""
        await self._engines.sleep_if_colocated()  # the float32 pass needs memory for another embedding
        rounded = await self._learner_logprobs(rows)
        return await self._learner_logprobs(rows, in_float32=True) if self._rounds else rounded, rounded

    def _bound(self, exact: Logprobs, rounded: Logprobs) -> float:
        """What an engine may differ by from the learner's float32 pass, by the learner's own difference from it."""
        return max(TOLERANCE, NOISE_FACTOR * max(_difference(exact, rounded)[0], self._engine_noise))


def _row(beginning: np.ndarray, completion: Completion) -> TokenSequence:
    log = TokenLog(beginning)
    log.add_sampled(completion)
    return log.sequence()


def _sampled_part(rows: Sequence[TokenSequence], columns: Logprobs) -> Logprobs:
    """The values of the response of each row, after one more entry, which is not compared."""
    return [column[row.prompt_length - 1 :] for row, column in zip(rows, columns, strict=True)]


def _kl(sampled: Logprobs, other: Logprobs) -> float:
    """Mean KL per token from the log-probs of both, by k3, the estimator of policy/engine_kl."""
    d = np.concatenate([a[1:] - b[1:] for a, b in zip(sampled, other, strict=True)]).astype(np.float64)
    return float((np.exp(-d) - 1 + d).mean())


def _check_alike(together: Completion, alone: Completion) -> None:
    """Raise ClusterError unless the engine sampled the same, bit for bit, next to other sequences and alone."""
    same_ids = np.array_equal(together.token_ids, alone.token_ids)
    if not same_ids or together.logprobs.tobytes() != alone.logprobs.tobytes():
        raise ClusterError(
            "run.deterministic=true: the engine sampled a response once next to others and once alone, with the same "
            "noise, and got other tokens or log-probs. What it computes for this model depends on the batch, so two "
            "runs would differ. Set run.deterministic=false."
        )


def _compare(expected: Logprobs, by_engine: Sequence[Logprobs], problem: str, bound: float) -> float:
    """The largest difference; raises ClusterError with the problem for an engine that differs by more than `bound`."""
    return max(
        (_check_engine(engine, expected, logprobs, problem, bound) for engine, logprobs in enumerate(by_engine)),
        default=0.0,
    )


def _check_engine(
    engine: int, expected: Logprobs, logprobs: Logprobs, problem: str, bound: float, remedy: str = ""
) -> float:
    mean, worst = _difference(expected, logprobs)
    if not mean <= bound:  # NaN does not pass either
        raise ClusterError(
            f"canary: engine {engine} {problem}: mean |log-prob difference| {mean:.4g} over "
            f"{sum(len(s) - 1 for s in expected)} tokens, tolerance {bound:.4g}; {worst}. {remedy}".rstrip()
        )
    return mean


def _difference(learner: Logprobs, engine: Logprobs) -> tuple[float, str]:
    """The mean absolute difference over all tokens but the first ones, and words that name the worst token."""
    differences = [np.abs(a[1:] - b[1:]) for a, b in zip(learner, engine, strict=True)]
    mean = float(np.concatenate(differences).mean())
    sequence = int(np.argmax([np.nan_to_num(d, nan=np.inf).max() for d in differences]))
    token = int(np.argmax(np.nan_to_num(differences[sequence], nan=np.inf))) + 1
    return mean, (
        f"worst at token {token} of sequence {sequence}: learner {learner[sequence][token]:.6f}, "
        f"engine {engine[sequence][token]:.6f}"
    )
