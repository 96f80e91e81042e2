"""The dataclasses that flow through a step; each stage has its own type.

    Prompt --sample--> Rollout --score--> ScoredRollout --collect--> RolloutGroup
           --flatten--> StepBatch --plan--> Minibatch --log-probs, advantages--> PolicyTargets --update--> StepMetrics

Arrays are numpy: they cross process boundaries without torch. `x[t]` describes token t everywhere, so that
`rollout_logprobs[t]` is the log-probability with which token t itself was sampled.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import numpy as np


@dataclass(frozen=True)
class Prompt:
    """One row of a data set, tokenized once. The engines get `token_ids` [P] int32.

    `in_thought`: the text of the prompt ends with the mark that opens a thought, so the response begins inside it.
    `is_text`: the row holds the prompt as a text, not as messages.
    """

    id: str
    epoch: int
    token_ids: np.ndarray
    messages: tuple[dict[str, str], ...]
    answer: str
    source: str
    columns: dict[str, Any] = field(default_factory=dict)
    in_thought: bool = False
    is_text: bool = False


class PromptRow(NamedTuple):
    """What a prompt's row says besides the prompt: the label of its data source, and its further columns."""

    source: str
    columns: dict[str, Any]


class VersionSpan(NamedTuple):
    """Tokens [start, end) of a rollout were sampled with the weights of this version (completed training steps)."""

    start: int
    end: int
    version: int


@dataclass(frozen=True)
class Support:
    """The part of the vocabulary that each of T tokens was sampled from, where sampling was restricted.

    Token t was sampled from ids[offsets[t]:offsets[t+1]], with `ids` [K] int32 and `offsets` [T+1] int64. An empty
    slice is the whole vocabulary.
    """

    ids: np.ndarray
    offsets: np.ndarray

    @classmethod
    def from_sizes(cls, ids: np.ndarray, sizes: np.ndarray) -> Support:
        """The support of T tokens: token t has the next `sizes[t]` of the ids [K]."""
        return cls(ids.astype(np.int32, copy=False), np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]))

    @classmethod
    def concatenated(cls, parts: Sequence[tuple[Support | None, int]]) -> Support | None:
        """Concatenate supports, each given with its number of tokens; None if no token has a support."""
        restricted = [support for support, _ in parts if support is not None and len(support.ids)]
        if not restricted:
            return None
        sizes = [np.zeros(count, np.int64) if support is None else support.sizes for support, count in parts]
        return cls.from_sizes(np.concatenate([support.ids for support in restricted]), np.concatenate(sizes))

    @property
    def sizes(self) -> np.ndarray:
        """[T] int64, ids in the support of each token; 0: the whole vocabulary."""
        return np.diff(self.offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: np.ndarray) -> Support:
        """The supports of the tokens `index`, in that order."""
        return Support.from_sizes(self.ids[_ranges(self.offsets, index)], self.sizes[index])


@dataclass(frozen=True)
class TokenSequence:
    """The ids that the engine saw and sampled in one context: one row of a batch.

    Attributes:
        token_ids: [L] int32, prompt and response.
        response_mask: [L] bool, True where the policy sampled the token; may have holes.
        rollout_logprobs: [L] float32, as the engine reported them; 0 outside the mask.
        version_spans: cover the tokens of the mask, in order.
        support: the support of every token; None where each was sampled from the whole vocabulary.
        experts: [L, layers, k] uint8 or uint16, the experts that computed each token in the engine
            (`learner.router_replay`); None if they were not recorded. The engine never computes the last token, nor the
            text that an environment adds after it. They repeat the last record; no sampled token follows them.
    """

    token_ids: np.ndarray
    response_mask: np.ndarray
    rollout_logprobs: np.ndarray
    version_spans: tuple[VersionSpan, ...]
    support: Support | None = None
    experts: np.ndarray | None = None

    @property
    def response_length(self) -> int:
        return int(np.count_nonzero(self.response_mask))

    @property
    def prompt_length(self) -> int:
        """The number of tokens before the first sampled one; all tokens if none was sampled."""
        first = int(self.response_mask.argmax())
        return first if self.response_mask[first] else len(self.token_ids)


@dataclass(frozen=True)
class Outcome:
    """The result of a finished rollout in its environment.

    Attributes:
        status: `ok`, or the reason why the environment gives no reward: `call_limit` or `environment_failed`.
        reward: the environment's own reward, one part of the whole reward; None if it gives none.
        parts: further named rewards.
        facts: values that rollouts/ and other parts of the reward get.
        attributes: attributes of the environment object, for reward functions that read `environments`.
        files: text files that a program left, by name, for parts of the reward; None if none were asked for.
        error: the failure, on one line.
    """

    status: str = "ok"
    reward: float | None = None
    parts: dict[str, float] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    files: dict[str, str] | None = None


NEVER_SAMPLED = sys.maxsize  # version of a rollout without tokens: it is never too old


@dataclass(frozen=True)
class Rollout:
    """One try at a prompt. Reward and advantage belong to it, and all of its sequences share them.

    Attributes:
        sequences: in the order of sampling; one, or more where the context was rewritten.
        finish_reason: `stop` (an end-of-sequence id or a stop string), `length`, or `abort`.
        turns: the messages after the prompt, if there is more than one.
        facts: further facts by name, for rollouts/.
        outcome: the result from its environment; None without an environment.
        opening: the messages of its prompt, if its environment began it differently from the first of its group.
    """

    prompt_id: str
    epoch: int
    sample: int
    sequences: tuple[TokenSequence, ...]
    finish_reason: str
    turns: tuple[dict[str, Any], ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)
    outcome: Outcome | None = None
    opening: tuple[dict[str, Any], ...] | None = None

    def __post_init__(self) -> None:
        assert self.sequences, "a rollout has at least one sequence"

    @property
    def version_spans(self) -> tuple[VersionSpan, ...]:
        """The spans of all sequences. Positions count from the beginning of each sequence."""
        return tuple(span for sequence in self.sequences for span in sequence.version_spans)

    @property
    def oldest_version(self) -> int:
        return min((span.version for span in self.version_spans), default=NEVER_SAMPLED)

    @property
    def response_ids(self) -> np.ndarray:
        """The sampled tokens of all sequences, int32."""
        return np.concatenate([sequence.token_ids[sequence.response_mask] for sequence in self.sequences])

    @property
    def rollout_logprobs(self) -> np.ndarray:
        """The engine's log-probs of `response_ids`, float32."""
        return np.concatenate([sequence.rollout_logprobs[sequence.response_mask] for sequence in self.sequences])

    @property
    def response_length(self) -> int:
        return sum(sequence.response_length for sequence in self.sequences)


@dataclass(frozen=True)
class ScoredRollout:
    """A graded rollout; `reward` None means that it could not be scored and takes no part in baseline or loss.

    Attributes:
        text: the decoded response, as it was graded.
        extracted: the answer that was graded; empty if the response has none.
        vote: in an evaluation, the first answer of the group that is equal to `extracted`.
        reward_parts: by name, before their weights.
        status: `ok` if nothing went wrong in grading.
        part_status: by part of the reward that was called, how its call ended: one of STATUSES (`rewards/grade.py`).
        errors: by part whose call failed, why, on one line.
    """

    rollout: Rollout
    text: str
    extracted: str
    reward: float | None
    reward_parts: dict[str, float | None]
    status: str
    vote: str = ""
    part_status: dict[str, str] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RolloutGroup:
    """The G samples of one prompt, in sample order; never mixed with another prompt's, never silently smaller."""

    prompt: Prompt
    samples: tuple[ScoredRollout, ...]

    @property
    def oldest_version(self) -> int:
        return min(sample.rollout.oldest_version for sample in self.samples)

    def rewards(self, part: str | None = None) -> list[float]:
        """The rewards of the scorable samples, or one part of them. A group of equal rewards teaches nothing."""
        scorable = [sample for sample in self.samples if sample.reward is not None]
        values = [sample.reward if part is None else sample.reward_parts.get(part) for sample in scorable]
        return [value for value in values if value is not None]


# Rounding error of float64. Sums of thousands of parts of size 1 stay far below it, and rewards that a grader can tell
# apart differ by more.
REWARD_ROUNDING = 1e-12


def rewards_differ(rewards: Iterable[float]) -> bool:
    """Whether any two rewards differ by more than rounding: REWARD_ROUNDING times max(1, the largest |reward|).

    So 0.1 + 0.2 equals 0.3, and 0.1 + 0.2 - 0.3 equals 0. NaN is not allowed. One rule for advantages, filters and
    metrics; never the std, since eight rewards of 0.1 have a float32 std above 0.
    """
    known = list(rewards)
    return len(known) > 1 and max(known) - min(known) > REWARD_ROUNDING * max(1.0, *map(abs, known))


@dataclass(frozen=True)
class PackedTokens:
    """Sequences one after another without padding: all of a step, or one microbatch of a learner.

    Attributes:
        token_ids, response_mask, rollout_logprobs: [T], as in `TokenSequence`.
        cu_seqlens: [S+1] int64; sequence s is tokens cu_seqlens[s] to cu_seqlens[s+1].
        rollout_tokens: [S] int64, sampled tokens of the whole rollout that each sequence belongs to; its other
            sequences may be in another microbatch.
        support: the support of every token; None where each was sampled from the whole vocabulary.
        experts: [T, layers, k], as in `TokenSequence`; None: the routers of the learner choose.
        prompt_rows: [S], of the prompt of each sequence; None unless the loss asks for them.
    """

    token_ids: np.ndarray
    response_mask: np.ndarray
    rollout_logprobs: np.ndarray
    cu_seqlens: np.ndarray
    rollout_tokens: np.ndarray
    support: Support | None = None
    experts: np.ndarray | None = None
    prompt_rows: tuple[PromptRow, ...] | None = None

    @property
    def lengths(self) -> np.ndarray:
        """[S] int64, tokens of each sequence."""
        return np.diff(self.cu_seqlens)

    def token_indices(self, rows: np.ndarray) -> np.ndarray:
        """[T'] int64, the positions of the tokens of these sequences, in the order of `rows`."""
        return _ranges(self.cu_seqlens, rows)

    def take(self, rows: np.ndarray) -> PackedTokens:
        """Only the sequences `rows` [S'] int64, in that order."""
        index = self.token_indices(rows)
        return PackedTokens(
            token_ids=self.token_ids[index],
            response_mask=self.response_mask[index],
            rollout_logprobs=self.rollout_logprobs[index],
            cu_seqlens=np.concatenate([[0], np.cumsum(self.lengths[rows])]),
            rollout_tokens=self.rollout_tokens[rows],
            support=None if self.support is None else self.support[index],
            experts=None if self.experts is None else self.experts[index],
            prompt_rows=None if self.prompt_rows is None else tuple(self.prompt_rows[row] for row in rows),
        )


def _ranges(bounds: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """The ranges bounds[i] to bounds[i+1] for each i in `chosen`, concatenated; int64."""
    lengths = bounds[chosen + 1] - bounds[chosen]
    ends = np.cumsum(lengths)
    return np.repeat(bounds[chosen] - ends + lengths, lengths) + np.arange(int(lengths.sum()))


@dataclass(frozen=True)
class StepBatch:
    """All rollouts of a training step, flat: a sequence is a row, and the rows of a rollout are adjacent.

    Attributes:
        tokens: columns [N] of all rows.
        rollouts: [B] int64, the rollout of each row, ascending.
        prompt_lengths: [B] int64, tokens before the first sampled one; all tokens if none was sampled.
        response_lengths: [B] int64, the number of sampled tokens.
        groups: [R] int64, the group of each rollout; the rollouts of a group are adjacent.
        rewards: [R] float64; NaN for unscorable rollouts.
        trained: [R] bool, True for rollouts that enter the loss and its denominators.
        prompt_rows: of the prompt of each group, which `groups` numbers.
    """

    tokens: PackedTokens
    rollouts: np.ndarray
    prompt_lengths: np.ndarray
    response_lengths: np.ndarray
    groups: np.ndarray
    rewards: np.ndarray
    trained: np.ndarray
    prompt_rows: tuple[PromptRow, ...] = ()

    @property
    def row_bounds(self) -> np.ndarray:
        """[R+1] int64; rollout r is rows row_bounds[r] to row_bounds[r+1]."""
        return np.searchsorted(self.rollouts, np.arange(len(self.trained) + 1))

    @property
    def trained_rows(self) -> np.ndarray:
        """[B] bool, the rows of trained rollouts."""
        return self.trained[self.rollouts]

    def rows_of(self, rollouts: np.ndarray) -> np.ndarray:
        """[B'] int64, the rows of these rollouts, in their order."""
        return _ranges(self.row_bounds, rollouts)

    def per_rollout(self, values: np.ndarray) -> np.ndarray:
        """[R], the sum of a number per row [B] over the rows of each rollout."""
        return np.add.reduceat(values, self.row_bounds[:-1])


@dataclass(frozen=True)
class Denominators:
    """Sizes of the whole minibatch over all data shards, fixed before the first backward."""

    tokens: int  # trained response tokens
    rollouts: int  # rollouts that have such tokens
    sequences: int


@dataclass(frozen=True)
class Minibatch:
    """One optimizer step: `microbatches` by data shard and microbatch: [S] int64 rows of the step; global denominators.

    All shards have the same number of microbatches, so some may be empty: a filler is computed in their place.
    """

    microbatches: tuple[tuple[np.ndarray, ...], ...]
    denominators: Denominators


class Targets:
    """Inputs of a loss besides the tokens: float32 columns [N] of a step or [T] of a microbatch, read in the mask."""

    def take(self, index: np.ndarray) -> Self:
        """The columns at these tokens."""
        return type(self)(*(None if column is None else column[index] for column in vars(self).values()))


@dataclass(frozen=True)
class PolicyTargets(Targets):
    advantages: np.ndarray
    old_logprobs: np.ndarray | None  # None where the current policy, or the engine's, is the old one
    ref_logprobs: np.ndarray | None  # None without a reference


@dataclass(frozen=True)
class ValueTargets(Targets):
    old_values: np.ndarray
    returns: np.ndarray


@dataclass(frozen=True)
class World:
    """The place of one actor within its role. The actors of a trained role are the ranks of one world.

    A data shard is `sequence_parallel` consecutive ranks. They compute the same microbatches, each a part of every row.
    """

    rank: int
    size: int
    local_rank: int
    master_host: str
    master_port: int
    threads: int  # threads of torch, on CPU and for an optimizer in host memory
    ranks_on_node: int = 1  # they share the node's memory
    deterministic: bool = False  # torch uses only algorithms that give the same bits every time
    version: int = 0  # version of the weights when the actor starts, in completed training steps
    deadline_s: float = 3600.0  # how long a rank waits for the others in a collective
    sequence_parallel: int = 1  # ranks that hold one row

    @property
    def shard(self) -> int:
        return self.rank // self.sequence_parallel


@dataclass(frozen=True)
class WeightsSent:
    """Learner rank 0's summary of a transfer to the engines."""

    share: float | None  # share of the elements that changed since the last transfer; None: not compared
    bytes: int  # sent to each node with engines
    why_all: str = ""  # why all weights were sent instead of changes; empty in the first transfer


@dataclass(frozen=True)
class GPUMemory:
    """Memory of a GPU that learners share with engines, as one rank sees it, bytes."""

    total: int
    free: int  # used by no process
    away: int  # of tensors that this rank has moved to host memory and will bring back


@dataclass(frozen=True)
class WrittenFile:
    """Size and CRC-32 of a file of a checkpoint."""

    bytes: int
    crc32: str


@dataclass(frozen=True)
class SaveReport:
    """The files of a checkpoint that one rank wrote, by name. `error`: why a file could not be written; else None."""

    files: dict[str, WrittenFile]
    error: str | None
