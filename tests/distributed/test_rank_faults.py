"""What one rank refuses, all refuse; what ranks must agree on; what they say to each other."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.rank_faults import (
    DRAWS,
    known_batches,
    messages,
    noise_differs,
    one_rank_cannot_fit_an_example,
    one_rank_refuses,
    one_rank_runs_out_of_memory,
    probe_traces,
    reads_alone,
    refused_inside_a_logical_batch,
    refused_settings,
    same_steps_are_skipped,
)
from tests.distributed.rank_pool import RankPool


@pytest.mark.parametrize("step", ["loop", "train_step"])
def test_a_step_that_one_rank_refuses_is_taken_by_none(two_ranks: RankPool, step: str) -> None:
    (there, weights, participations, steps), (here, other_weights, *_) = two_ranks.run(one_rank_refuses, step)
    assert there.startswith("StepNotTakenError: another rank refused this step")
    assert "NaN" in here
    assert "StepNotTaken" not in here
    assert steps == 6
    expected = torch.zeros(61, dtype=torch.long)
    for part in DRAWS:
        for drawn in part[:2] + part[3:]:
            expected[drawn] += 1
    assert torch.equal(participations, expected)
    assert all(torch.equal(a, b) for a, b in zip(weights, other_weights, strict=True))


def test_ranks_must_agree_on_the_noise(two_ranks: RankPool) -> None:
    assert all("disagree on noise_multiplier: between 0.45 and 0.9" in text for text in two_ranks.run(noise_differs))


def test_a_refusal_inside_a_logical_batch_ends_the_run(two_ranks: RankPool) -> None:
    there, here = two_ranks.run(refused_inside_a_logical_batch)
    assert "another rank refused" in there[0]
    assert "NaN" in here[0]
    assert all("no longer at the same one" in texts[1] for texts in (there, here))


def test_messages(two_ranks: RankPool) -> None:
    """0 bytes for the trace at a step; the answers that let all ranks refuse a step together are 72."""
    for by_step, reading, gradient in two_ranks.run(messages):
        sent = [step["all_reduce"] - gradient for step in by_step]
        assert sent == [72 + 2 * 8 * 61] * 14  # with a point of the timeline at every step, as a pass is so short
        entered = [place for place, step in enumerate(by_step) if "all_gather" in step]
        assert entered == [7]  # once a pass, whose length is 61/8 steps
        assert by_step[7]["all_gather"] == 12 * 8 * 3  # a participation: 12 bytes
        assert reading["all_reduce"] == 61 * 68  # the ledger's sums, for all readings together


def test_messages_of_longer_passes(two_ranks: RankPool) -> None:
    """One point of the timeline in eight steps, as there are eight in a pass of 61 steps."""
    for by_step, _, gradient in two_ranks.run(messages, batch_size=1):
        usual, noted = {"all_reduce": gradient + 72}, {"all_reduce": gradient + 72 + 2 * 8 * 61}
        assert by_step == [*[usual] * 7, noted, *[usual] * 6]


def test_after_gather_a_rank_reads_alone(two_ranks: RankPool) -> None:
    (alone, together), (_, elsewhere) = two_ranks.run(reads_alone)
    assert alone == together == elsewhere


def test_all_ranks_skip_the_same_steps(two_ranks: RankPool) -> None:
    measured, participations = two_ranks.run(same_steps_are_skipped)[0]
    assert bool((participations == 14).all())
    assert 0 < int(measured[0]) < 14
    assert bool((measured == measured[0]).all())


def test_probes_differ_between_ranks_and_are_reproducible(two_ranks: RankPool) -> None:
    traces = two_ranks.run(probe_traces)[1]
    assert not torch.allclose(traces[0::2], traces[1::2], rtol=1e-6)
    assert torch.equal(traces, two_ranks.run(probe_traces)[0])


def test_what_cannot_be_accounted_for_is_refused(two_ranks: RankPool) -> None:
    for errors in two_ranks.run(refused_settings):
        reasons = ("before they are clipped", "num_probes=", "DistributedSampler(dataset", "drop_last=True")
        for error, reason in zip(errors, reasons, strict=True):
            assert reason in error


def test_passes_over_parts_of_the_data(two_ranks: RankPool) -> None:
    (participations, drawn, history, error), (_, others, same, too) = two_ranks.run(known_batches)
    expected = torch.bincount(torch.tensor([i for draw in drawn + others for i in draw]), minlength=9)
    assert torch.equal(participations, expected)
    assert int(expected.sum()) == 16
    assert history == same == [(1.0, 1.0, 2)]
    assert "of ranks [0, 1]" in error
    assert error == too


@pytest.mark.parametrize("step", ["loop", "train_step"])
def test_only_the_rank_that_ran_out_of_memory_halves(two_ranks: RankPool, step: str) -> None:
    (weights, sums, _, limit), _ = two_ranks.run(one_rank_runs_out_of_memory, None, step)
    (here, ours, silent, unchanged), (there, theirs, told, halved) = two_ranks.run(one_rank_runs_out_of_memory, 1, step)
    assert silent == []
    assert len(told) == 1
    assert halved < limit == unchanged
    for found in (here, there):
        for a, b in zip(found, weights, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    for name, value in sums.items():
        for found_sums in (ours, theirs):
            torch.testing.assert_close(
                found_sums[name], value, rtol=1e-9, atol=1e-9 * float(value.abs().max()), msg=name
            )


def test_where_one_example_does_not_fit_no_rank_takes_the_step(two_ranks: RankPool) -> None:
    there, here = two_ranks.run(one_rank_cannot_fit_an_example)
    assert "another rank refused this step" in there
    assert "one example ran out of memory" in here
