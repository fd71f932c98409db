"""`nearest_demonstration`: worked values, brute force, and what is not known of the last step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from data.errors import DatasetError
from data.labels import Labels
from data.trajectories import Trajectories
from labelers.evidence import Evidence
from labelers.nearest_demonstration import BLOCK, NearestDemonstration

CPU = torch.device("cpu")
FILES = Path(__file__).parent / "files"
Make = Callable[..., Trajectories]


def label(data: Trajectories, demonstrations: Trajectories, **settings: object) -> Labels:
    labeler = NearestDemonstration.model_validate({"demonstrations": {"episodes": [0]}, **settings})
    return labeler.fit(data, Evidence("x", demonstrations=demonstrations), device=CPU).label(data)


def points(data: Trajectories, *, actions: bool) -> np.ndarray:
    rows = np.arange(data.n_steps) + data.episode_index
    columns = [data.observations[rows], *([data.actions] if actions else []), data.observations[rows + 1]]
    return np.concatenate(columns, axis=1).astype(np.float64)


def path(*observations: float, actions: int = 3, final_observed: bool = True) -> Trajectories:
    """One episode along a line, with actions of zeros."""
    n = len(observations) - 1
    return Trajectories(
        observations=np.array(observations, np.float32)[:, None],
        actions=np.zeros((n, actions), np.float32),
        offsets=np.array([0, n]),
        terminated=np.array([False]),
        truncated=np.array([True]),
        final_observed=np.array([final_observed]),
    )


def test_rewards_are_the_worked_values() -> None:
    # From (s, s') = (0, 0) to (0, 0), (0, 1.2), (1.2, x) with x^2 = 9 - 1.44: distances 0, 1.2 and 3, |A| = 3.
    # exp(-0.5 * 1.2 / 3) = .81873075 and exp(-0.5 * 3 / 3) = .60653066.
    data = path(0, 0, 1.2, (9 - 1.44) ** 0.5)
    labels = label(data, path(0, 0))
    assert labels.rewards == pytest.approx([1, 0.81873075, 0.60653066], rel=1e-6)
    assert labels.diagnostics is not None
    assert labels.diagnostics["mean_distance"].to_list() == pytest.approx([1.4], rel=1e-6)


def test_alpha_beta_and_the_division_are_as_said() -> None:
    # the step (0, 1.2) is 1.2 away: 2 exp(-5 * 1.2 / 3) = 2 * .13533528; undivided exp(-0.5 * 1.2) = .54881164
    data, demonstration = path(0, 1.2), path(0, 0)
    assert label(data, demonstration, alpha=2, beta=5).rewards == pytest.approx([0.27067057], rel=1e-6)
    assert label(data, demonstration, per_dimension=False).rewards == pytest.approx([0.54881164], rel=1e-6)


@pytest.mark.parametrize("match", ["sas", "ss"])
def test_distances_are_those_of_brute_force(random_trajectories: Make, match: str) -> None:
    data, demonstrations = random_trajectories((50, 1, 200, 3)), random_trajectories((30, 1, 40), seed=1)
    ours, theirs = (points(t, actions=match == "sas") for t in (data, demonstrations))
    distances = np.sqrt(((ours[:, None] - theirs[None]) ** 2).sum(2)).min(1)
    found = label(data, demonstrations, match=match).rewards
    assert found == pytest.approx(np.exp(-0.5 * distances / 2), rel=1e-6)


def test_a_demonstration_is_worth_alpha_everywhere(random_trajectories: Make) -> None:
    data = random_trajectories((9, 4))
    assert label(data, data, alpha=5).rewards.tolist() == [5] * 13


def test_an_unknown_next_observation_takes_no_part() -> None:
    # The row after the last step repeats the observation before, 5: compared, it would be 5 away from (5, 0).
    data = path(0, 5, 5, final_observed=False)
    demonstration = path(0, 5, 0)
    labels = label(data, demonstration)
    assert labels.rewards.tolist() == [1, 1]
    assert labels.diagnostics is not None
    assert labels.diagnostics["next_unknown"].to_list() == [True]
    known = label(replace(data, final_observed=np.array([True])), demonstration)
    assert known.rewards[1] == pytest.approx(np.exp(-0.5 * 5 / 3))
    # The demonstration's own last step, if its next observation is unknown, is nobody's whole transition.
    cut = label(path(5, 5), path(0, 5, 5, final_observed=False))
    assert cut.rewards == pytest.approx([np.exp(-0.5 * 5 / 3)])


def test_discrete_actions_that_differ_are_the_square_root_of_2_apart(random_trajectories: Make) -> None:
    data = replace(path(0, 0, 0), actions=np.array([2, 0]), n_actions=(3,))
    demonstration = replace(path(0, 0), actions=np.array([2]), n_actions=(3,))
    assert label(data, demonstration).rewards == pytest.approx([1, np.exp(-0.5 * 2**0.5)])
    several = replace(path(0, 0), actions=np.array([[1, 1]]), n_actions=(2, 2))
    other = replace(several, actions=np.array([[1, 0]]))
    assert label(several, other).rewards == pytest.approx([np.exp(-0.5 * 2**0.5 / 2)])


@pytest.mark.parametrize("split", [[0], [3, 1], [2, 0, 3, 1]], ids=str)
def test_any_sharding_and_order_of_episodes_gives_the_same_bits(random_trajectories: Make, split: list[int]) -> None:
    data = random_trajectories((30, 1, BLOCK, 7))
    labeler = NearestDemonstration.model_validate({"demonstrations": {"episodes": [0]}})
    demonstrations = random_trajectories((25, 6), seed=1)
    fitted = labeler.fit(data, Evidence("x", demonstrations=demonstrations), device=CPU)
    whole = fitted.label(data).rewards
    steps = np.concatenate([np.arange(data.offsets[e], data.offsets[e + 1]) for e in split])
    assert fitted.label(data.select(split)).rewards.tobytes() == whole[steps].tobytes()


def test_zero_observations_and_demonstrations_of_another_length_are_no_trouble() -> None:
    with np.load(FILES / "zero_vectors.npz") as file:
        x, y = file["x"].astype(np.float32), file["y"].astype(np.float32)
    data, demonstration = (
        Trajectories(
            observations=p,
            actions=np.zeros((len(p) - 1, 1), np.float32),
            offsets=np.array([0, len(p) - 1]),
            terminated=np.array([True]),
            truncated=np.array([False]),
            final_observed=np.array([True]),
        )
        for p in (x, y)
    )
    rewards = label(data, demonstration).rewards
    assert np.isfinite(rewards).all() and (rewards > 0).all()


def test_demonstrations_of_another_kind_are_refused(random_trajectories: Make) -> None:
    data = random_trajectories((4,))
    with pytest.raises(DatasetError, match=r"observations of the demonstrations are \(5,\) a step .* dataset \(3,\)"):
        label(data, random_trajectories((4,), width=5))
    with pytest.raises(DatasetError, match="actions of the demonstrations are"):
        label(data, random_trajectories((4,), n_actions=(3,)))
    with pytest.raises(DatasetError, match=r"n_actions of the demonstrations is \(4,\) and that of the dataset \(3,\)"):
        label(random_trajectories((4,), n_actions=(3,)), random_trajectories((4,), n_actions=(4,)))


def test_demonstrations_without_one_whole_transition_are_refused() -> None:
    with pytest.raises(DatasetError, match="no step whose next observation was recorded"):
        label(path(0, 1), path(0, 0, final_observed=False))
