"""The log of a rollout: which tokens were sampled, with what log-prob and version, and which were said."""

from __future__ import annotations

import numpy as np

from rlhf.rollout.worker import to_rollout
from rlhf.sampling.requests import Completion
from rlhf.sampling.token_log import TokenLog
from rlhf.types import Prompt, VersionSpan


def sampled(*token_ids: int, versions: tuple[tuple[int, int, int], ...]) -> Completion:
    """A turn; token i has the log-prob -i."""
    ids = np.array(token_ids, np.int32)
    return Completion(ids, -ids.astype(np.float32), "stop", tuple(VersionSpan(*span) for span in versions))


def two_turns() -> TokenLog:
    log = TokenLog(np.array([90, 91], np.int32))
    log.add_sampled(sampled(1, 2, 3, versions=((0, 2, 4), (2, 3, 5))))
    log.add_said(np.array([80, 81], np.int32))
    log.add_sampled(sampled(4, 5, versions=((0, 2, 5),)))
    return log


def test_the_mask_is_true_exactly_at_sampled_tokens_and_log_probs_and_versions_stand_beside_them() -> None:
    sequence = two_turns().sequence()
    assert sequence.token_ids.tolist() == [90, 91, 1, 2, 3, 80, 81, 4, 5]
    assert sequence.response_mask.tolist() == [False] * 2 + [True] * 3 + [False] * 2 + [True] * 2
    assert sequence.rollout_logprobs.tolist() == [0, 0, -1, -2, -3, 0, 0, -4, -5]
    assert sequence.version_spans == ((2, 4, 4), (4, 5, 5), (7, 9, 5))
    assert (sequence.prompt_length, sequence.response_length) == (2, 5)
    columns = (sequence.token_ids, sequence.response_mask, sequence.rollout_logprobs)
    assert [column.dtype for column in columns] == [np.int32, bool, np.float32]


def test_what_was_appended_stays_at_its_place_whenever_the_ids_are_read() -> None:
    log = TokenLog(np.array([90, 91], np.int32))
    assert log.token_ids.tolist() == [90, 91]
    log.add_sampled(sampled(1, versions=((0, 1, 0),)))
    assert (log.token_ids.tolist(), log.last_id, len(log)) == ([90, 91, 1], 1, 3)
    log.add_said(np.array([], np.int32))
    log.add_said(np.array([80], np.int64))
    assert (log.token_ids.tolist(), log.last_id, len(log)) == ([90, 91, 1, 80], 80, 4)
    assert log.sequence().token_ids.dtype == np.int32


def test_the_room_is_what_may_follow_the_prompt_less_what_does() -> None:
    log = two_turns()
    assert [log.room(limit) for limit in (100, 8, 7, 3)] == [93, 1, 0, 0]


def test_a_rollout_of_one_turn_is_its_prompt_and_its_completion() -> None:
    prompt = Prompt("p/1", 0, np.array([90, 91], np.int32), (), "", "p")
    completion = sampled(1, 2, versions=((0, 1, 3), (1, 2, 4)))
    rollout = to_rollout(prompt, 5, completion)
    (sequence,) = rollout.sequences
    assert (rollout.sample, rollout.finish_reason) == (5, "stop")
    assert sequence.token_ids.tolist() == [90, 91, 1, 2]
    assert sequence.response_mask.tolist() == [False, False, True, True]
    assert sequence.rollout_logprobs.tolist() == [0, 0, -1, -2]
    assert sequence.version_spans == (VersionSpan(2, 3, 3), VersionSpan(3, 4, 4))
