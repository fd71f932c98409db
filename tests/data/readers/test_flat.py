"""Where episodes of flat recordings begin and end, and what follows their last step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data.errors import AssayError
from data.labels import episode_returns
from data.readers import flat_source


def lengths(read) -> list[int]:
    return read.trajectories.lengths.tolist()


def with_flags(recording, n, terminated=(), truncated=(), last_rows=None):
    return recording(n) | {"terminals": last_rows(n, terminated), "timeouts": last_rows(n, truncated)}


# ---------------------------------------------------------------- flags


def test_episodes_end_terminated_truncated_both_or_with_the_file(read, recording, last_rows):
    n = (6, 5, 4, 8)
    arrays = with_flags(recording, n, (0, 2), (1, 2), last_rows)
    got = read(arrays)
    assert lengths(got) == [6, 5, 4, 8]
    assert got.trajectories.terminated.tolist() == [True, False, True, False]
    assert got.trajectories.truncated.tolist() == [False, True, True, True]
    assert got.trajectories.final_observed.all()
    assert len(got.trajectories.observations) == 27
    # 1+..+6, 7+..+11, 12+..+15, 16+..+23
    assert episode_returns(got.rewards, got.trajectories.offsets).tolist() == [21, 45, 54, 156]
    unfinished = got.finding("unfinished-last-episode")
    assert unfinished.episode == 3 and unfinished.severity == "note"
    finals = got.trajectories.observations[got.trajectories.offsets[1:] + np.arange(4)]
    np.testing.assert_array_equal(finals, arrays["next_observations"][np.cumsum(n) - 1])


def test_without_next_observations_flagged_ends_are_kept_and_never_bootstrapped(read, recording, last_rows):
    n = (5, 4, 6, 3)
    arrays = with_flags(recording, n, (1, 3), (0, 2), last_rows)
    del arrays["next_observations"]
    got = read(arrays)
    assert lengths(got) == [5, 4, 6, 3] and len(got.rewards) == 18
    # 14 steps inside episodes and the 2 terminal ones; rows 4 and 14 have no next observation.
    assert sorted(set(range(18)) - set(got.trajectories.transition_index.tolist())) == [4, 14]
    unknown = got.finding("final-observation-unknown")
    assert unknown.count == 2 and "episode 0, step 4; episode 2, step 5" in unknown.message
    assert "unfinished-last-episode" not in got.codes


def test_without_next_observations_the_last_row_of_an_unfinished_episode_becomes_its_last_observation(
    read, recording, last_rows
):
    n = (5, 4)
    arrays = with_flags(recording, n, (0,), (), last_rows)
    del arrays["next_observations"]
    got = read(arrays)
    assert lengths(got) == [5, 3]
    np.testing.assert_array_equal(got.trajectories.observations[-1], arrays["observations"][-1])
    assert got.trajectories.final_observed.tolist() == [False, True]
    assert got.rewards.tolist() == list(range(1, 9))
    found = got.finding("unfinished-last-episode")
    assert found.severity == "warning" and "its step is dropped" in found.message


@pytest.mark.parametrize("value", ["own", "zeros", "nan"])
def test_an_unfinished_episode_whose_last_next_observation_is_no_observation_loses_its_last_step(
    read, recording, last_rows, value
):
    arrays = with_flags(recording, (5, 4), (0,), (), last_rows)
    arrays["next_observations"][-1] = {"own": arrays["observations"][-1], "zeros": 0, "nan": np.nan}[value]
    got = read(arrays)
    assert lengths(got) == [5, 3] and got.trajectories.final_observed.all()
    np.testing.assert_array_equal(got.trajectories.observations[-1], arrays["observations"][-1])


def test_without_next_observations_a_lone_last_row_is_dropped(read, recording, last_rows):
    arrays = with_flags(recording, (5, 1), (0,), (), last_rows)
    del arrays["next_observations"]
    got = read(arrays)
    assert lengths(got) == [5] and "dropped" in got.finding("unfinished-last-episode").message


def test_an_end_that_no_flag_marks_is_cut_where_the_next_observation_is_not_the_following_row(
    read, recording, last_rows
):
    got = read(with_flags(recording, (6, 5, 4), (0, 2), (), last_rows))
    assert lengths(got) == [6, 5, 4] and got.trajectories.truncated.tolist() == [False, True, False]
    assert "row 10 end" in got.finding("unflagged-ends").message


@pytest.mark.parametrize("late", [1, -1])
def test_flags_beside_the_true_ends_are_refused(refusal, read, recording, late):
    arrays = recording((8, 8, 8))
    timeouts = np.zeros(24, bool)
    timeouts[[7 + late, 15 + late, 23]] = True
    message = refusal(arrays | {"timeouts": timeouts})
    assert "rows 7, 15 end without a flag" in message
    assert f"rows {7 + late}, {15 + late} have a flag and go on" in message
    got = read(arrays | {"timeouts": timeouts}, timeouts="ignore")
    assert lengths(got) == [8, 8, 8]
    steps = np.linalg.norm(np.diff(got.trajectories.observations, axis=0), axis=1)
    steps[got.trajectories.offsets[1:-1] + np.arange(2)] = 0  # from one episode to the next
    assert steps.max() < 1
    trusted = read(arrays | {"timeouts": timeouts}, timeouts="trust")
    assert lengths(trusted) == [8 + late, 8, 8 - late]
    assert "cross a reset" in trusted.finding("crosses-jumps").message


def test_flags_far_from_the_true_ends_are_refused(refusal, recording):
    timeouts = np.zeros(40, bool)
    timeouts[[12, 32, 39]] = True
    assert "contradict" in refusal(recording((10, 20, 10)) | {"timeouts": timeouts})


@pytest.mark.parametrize("late", [1, -1])
def test_late_flags_are_seen_by_long_steps_without_next_observations(refusal, read, recording, last_rows, late):
    n = (30, 30, 30, 30)
    arrays = recording(n)
    del arrays["next_observations"]
    right = last_rows(n)
    assert lengths(read(arrays | {"timeouts": right})) == [30] * 4
    wrong = np.roll(right, late)
    wrong[[0, -1]] = False, True
    assert "beside the true ends" in refusal(arrays | {"timeouts": wrong})
    assert read(arrays | {"timeouts": wrong}, timeouts="trust").trajectories.n_episodes == 4 + (late < 0)


def test_part_of_an_observation_that_changes_between_steps_is_no_end_and_is_counted(read, recording, last_rows):
    # A maze that draws a new goal (last column) once the old one is reached, while the agent goes on.
    n = (20, 20)
    arrays = with_flags(recording, n, (), (0, 1), last_rows)
    goal = np.repeat([1.0, 2.0, 3.0, 4.0], 10).astype(np.float32)
    arrays["observations"][:, 2] = goal
    arrays["next_observations"][:, 2] = goal  # row 9 holds goal 1 and row 10 goal 2
    got = read(arrays)
    assert lengths(got) == [20, 20] and got.finding("observation-changed").count == 2
    assert "unflagged-ends" not in got.codes


# ---------------------------------------------------------------- no timeouts


def test_without_timeouts_recordings_are_cut_where_the_next_observation_is_not_the_following_row(read, recording):
    got = read(recording((7, 7, 5)))
    assert lengths(got) == [7, 7, 5]
    assert "2 cuts without a flag" in got.finding("no-timeouts").message


def test_without_timeouts_and_next_observations_a_length_cuts(read, refusal, recording, last_rows):
    n = (7, 3, 7, 2)
    arrays = recording(n) | {"terminals": last_rows(n, (1,))}
    del arrays["next_observations"]
    assert "max_episode_steps" in refusal(arrays)
    got = read(arrays, max_episode_steps=7)
    # The last two rows are an unfinished episode, whose last row becomes its last observation.
    assert lengths(got) == [7, 3, 7, 1]
    assert got.trajectories.terminated.tolist() == [False, True, False, False]
    assert got.trajectories.final_observed.tolist() == [False, False, False, True]


def test_without_timeouts_terminals_that_explain_the_last_row_are_enough(read, recording, last_rows):
    n = (7, 3)
    arrays = recording(n) | {"terminals": last_rows(n)}
    del arrays["next_observations"]
    got = read(arrays)
    assert lengths(got) == [7, 3] and got.finding("no-timeouts").severity == "warning"


def test_without_timeouts_next_observations_made_by_shifting_tell_nothing(refusal, recording):
    arrays = recording((7, 7, 5))
    arrays["next_observations"] = np.concatenate([arrays["observations"][1:], arrays["observations"][-1:]])
    assert "max_episode_steps" in refusal(arrays)


def test_a_hidden_reset_is_suspected_by_its_length(read, recording, last_rows):
    n = (40, 40, 40)
    arrays = recording(n) | {"terminals": last_rows(n, (0, 2))}
    del arrays["next_observations"]
    assert "row 79 " in read(arrays).finding("long-steps").message


def test_a_length_is_not_used_beside_timeouts(read, recording, last_rows):
    got = read(with_flags(recording, (7, 7), (), (0, 1), last_rows), max_episode_steps=3)
    assert lengths(got) == [7, 7] and "limit-not-used" in got.codes


# ---------------------------------------------------------------- final observations


def test_next_observations_made_by_shifting_are_not_bootstrapped_from(read, recording, last_rows):
    n = (6, 5, 4)
    arrays = with_flags(recording, n, (2,), (0, 1), last_rows)
    arrays["next_observations"] = np.concatenate([arrays["observations"][1:], arrays["observations"][-1:]])
    got = read(arrays)
    assert lengths(got) == [6, 5, 4]
    assert got.trajectories.final_observed.tolist() == [False, False, False]
    assert sorted(set(range(15)) - set(got.trajectories.transition_index.tolist())) == [5, 10]
    assert "first of the following episode" in got.finding("final-observation-unknown").message


@pytest.mark.parametrize("value", ["own", "zeros", "nan"])
def test_a_copied_or_empty_next_observation_is_not_bootstrapped_from(read, recording, last_rows, value):
    n = (6, 5)
    arrays = with_flags(recording, n, (), (0, 1), last_rows)
    arrays["next_observations"][5] = {"own": arrays["observations"][5], "zeros": 0, "nan": np.nan}[value]
    got = read(arrays)
    assert got.trajectories.final_observed.tolist() == [False, True]
    assert "episode 0, step 5" in got.finding("final-observation-unknown").message
    assert np.isfinite(got.trajectories.observations).all()


def test_a_resting_agent_has_its_own_next_observation(read, recording, last_rows):
    arrays = with_flags(recording, (6, 5), (), (0, 1), last_rows)
    arrays["observations"][2:6] = arrays["observations"][2]
    arrays["next_observations"][1:6] = arrays["observations"][2]
    assert read(arrays).trajectories.final_observed.all()


# ---------------------------------------------------------------- goals


@pytest.fixture
def goal_region(recording, last_rows):
    """Three recordings of 10 steps; the goal is reached on rows 6-9 and 24-26, and the recording goes on."""
    goal = np.zeros(30, np.float32)
    goal[[6, 7, 8, 9, 24, 25, 26]] = 1
    return recording((10, 10, 10)) | {
        "rewards": goal,
        "terminals": goal.astype(bool),
        "timeouts": last_rows((10, 10, 10)),
    }


def test_a_goal_region_is_cut_at_every_flag_and_the_single_steps_are_counted(read, goal_region):
    got = read(goal_region)
    assert lengths(got) == [7, 1, 1, 1, 10, 5, 1, 1, 3]
    assert got.finding("one-step-episodes").count == 5
    assert got.rewards.sum() == 7
    assert np.flatnonzero(~got.trajectories.continues).tolist() == [6, 7, 8, 9, 24, 25, 26]


def test_a_goal_region_can_be_cut_at_its_first_step(read, goal_region):
    got = read(goal_region, goals="first")
    assert lengths(got) == [7, 10, 5]
    assert got.trajectories.terminated.tolist() == [True, False, True]
    assert got.finding("steps-after-goal").count == 8  # 3 and 5
    assert got.trajectories.final_observed.all()


def test_a_goal_region_can_be_left_whole(read, goal_region):
    got = read(goal_region, goals="whole")
    assert lengths(got) == [10, 10, 10]
    assert got.trajectories.terminated.tolist() == [True, False, False]
    assert "goals-whole" in got.codes


def test_goals_need_to_know_where_recordings_end(refusal, goal_region):
    del goal_region["timeouts"], goal_region["next_observations"]
    assert "max_episode_steps" in refusal(goal_region, goals="first")


# ---------------------------------------------------------------- streams


@given(
    goals=st.sampled_from(["every_flag", "first", "whole"]),
    limit=st.sampled_from([None, 4]),
    following=st.booleans(),
    n=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    flags=st.lists(st.sampled_from(["terminal", "timeout", "both"]), min_size=6, max_size=6),
    inside=st.sets(st.integers(0, 53), max_size=6),
    unfinished=st.booleans(),
    rows=st.integers(1, 12),
)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_how_the_file_is_sliced_changes_nothing(
    read, recording, goals, limit, following, n, flags, inside, unfinished, rows
):
    """The same recording read in slices of a few rows and at once gives the same episodes and the same findings."""
    arrays = recording(tuple(n))
    last = np.cumsum(n) - 1
    kinds = np.array(flags)[: len(n)]
    arrays["terminals"][last[kinds != "timeout"]] = True
    arrays["terminals"][[row for row in inside if row < len(arrays["terminals"])]] = True
    if limit is None:
        arrays["timeouts"] = np.zeros(len(arrays["terminals"]), bool)
        arrays["timeouts"][last[kinds != "terminal"]] = True
    if unfinished:
        for key in ("terminals", "timeouts"):
            arrays.get(key, arrays["terminals"])[-1] = False
    if not following:
        del arrays["next_observations"]
    chosen = {"goals": goals, "max_episode_steps": limit}

    def outcome():
        try:
            got = read(arrays, **chosen)
        except AssayError as error:
            return type(error), str(error)
        # Steps far longer than others are judged slice by slice.
        findings = [f for f in got.findings if f.code != "long-steps"]
        return got.trajectories.digest(), None if got.rewards is None else got.rewards.tolist(), findings

    whole = outcome()
    size, flat_source.SLICE_BYTES = flat_source.SLICE_BYTES, rows * 41
    try:
        assert outcome() == whole
    finally:
        flat_source.SLICE_BYTES = size
