"""The sampler's measure of engine speed."""

from __future__ import annotations

import time

import pytest

from rlhf.run.sample_and_grade import BusyMeter


def test_tokens_that_arrive_during_an_evaluation_are_in_the_rate_of_the_next_step() -> None:
    meter = BusyMeter()
    meter.begin()
    time.sleep(0.01)
    meter.end()
    meter.tokens += 30
    rate, busy_s = meter.take()
    assert busy_s >= 0.01
    assert rate == pytest.approx(30 / busy_s)
    assert meter.take() == (0.0, 0.0)
