"""`optimistic`: the worked value, and a bonus that is high where nothing is labelled."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from data.statistics import moments_of
from data.trajectories import Trajectories
from labelers.evidence import Evidence
from labelers.networks import Networks
from labelers.optimistic import FittedOptimistic, Optimistic, bonus
from labelers.reward_model import FittedRewardModel, RewardModel

CPU = torch.device("cpu")
SMALL = Optimistic(members=2, hidden=(32, 32), steps=200)


def always(*outputs: list[float]) -> Networks:
    """Networks of no hidden layer that say the same whatever they see: observation, action and end, a column each."""
    biases = torch.tensor(outputs)[:, None]
    return Networks.of({"weight.0": torch.zeros(len(outputs), 3, biases.shape[2]), "bias.0": biases})


def two_places(seed: int, n: int = 40) -> tuple[Trajectories, np.ndarray]:
    """Half of the episodes lie around 0 and have labels (the first three steps of each), the others around 4."""
    rng = np.random.default_rng(seed)
    observations = rng.normal(size=(n, 6, 3)) * 0.3 + 4 * (np.arange(n) % 2)[:, None, None]
    data = Trajectories(
        observations=observations.reshape(-1, 3).astype(np.float32),
        actions=rng.normal(size=(n * 5, 1)).astype(np.float32),
        offsets=np.arange(0, 5 * n + 1, 5),
        terminated=np.zeros(n, bool),
        truncated=np.ones(n, bool),
        final_observed=np.ones(n, bool),
    )
    rewards = data.step_observations[:, 0] + data.actions[:, 0]
    labelled = (data.episode_index % 2 == 0) & (np.arange(data.n_steps) % 5 < 3)
    return data, np.where(labelled, rewards, np.float32(np.nan)).astype(np.float32)


def test_the_bonus_and_its_gradient_are_the_worked_values() -> None:
    learned = torch.tensor([0.1, 0.4, 0.0, 0.3], requires_grad=True)
    fixed = torch.tensor([0.0, 0.2, 0.1, 0.1])
    # (.01 + .04 + .01 + .04) / 4
    found = bonus(learned, fixed)
    assert found.item() == pytest.approx(0.025)
    # 2 (learned - fixed) / 4, at both signs of the difference
    (gradient,) = torch.autograd.grad(found, [learned])
    assert gradient.tolist() == pytest.approx([0.05, 0.1, -0.05, 0.1])


@pytest.mark.parametrize(("coefficient", "label"), [(1.0, -0.925), (0.0, -0.95), (-1.0, -0.975)])
def test_a_label_is_the_learned_reward_plus_the_bonus(coefficient: float, label: float) -> None:
    moments = moments_of(np.zeros((2, 3)))
    model = FittedRewardModel(
        RewardModel(members=1, hidden=(), next_observations=False), always([-0.95]), moments, 0, 1, -1, 0, {}
    )
    configuration = Optimistic(coefficient=coefficient, members=1, hidden=())
    fitted = FittedOptimistic(configuration, model, always([0.1, 0.4, 0, 0.3]), always([0, 0.2, 0.1, 0.1]), {})
    data = Trajectories(
        observations=np.zeros((3, 1), np.float32),
        actions=np.zeros((2, 1), np.float32),
        offsets=np.array([0, 2]),
        terminated=np.array([True]),
        truncated=np.array([False]),
        final_observed=np.array([True]),
    )
    labels = fitted.label(data, np.array([np.nan, 0.125], np.float32))
    assert labels.rewards == pytest.approx([label, 0.125])
    assert labels.diagnostics is not None
    assert labels.diagnostics["bonus"].to_list() == pytest.approx([0.025])


def test_the_bonus_stays_high_where_nothing_is_labelled() -> None:
    data, known = two_places(0)
    fitted = SMALL.fit(data, Evidence("x", rewards=known), device=CPU)
    unlabelled = np.flatnonzero(np.isnan(known))
    far = data.episode_index[unlabelled] % 2 == 1
    found = fitted.bonus(data, unlabelled)
    assert found[far].mean() > 10 * found[~far].mean()
    assert fitted.report["mean_bonus_known"] == pytest.approx(found[~far].mean(), rel=0.5)
    labels = fitted.label(data, known).rewards
    assert (labels[~np.isnan(known)] == known[~np.isnan(known)]).all()


def test_without_a_bonus_it_is_the_reward_model() -> None:
    data, known = two_places(1)
    evidence = Evidence("x", rewards=known)
    plain = SMALL.model_copy(update={"coefficient": 0.0})
    labels = plain.fit(data, evidence, device=CPU).label(data, known).rewards
    assert labels.tolist() == plain.reward_model.fit(data, evidence, device=CPU).label(data, known).rewards.tolist()


def test_any_sharding_gives_the_same_bits_and_so_does_a_saved_one(tmp_path: Path) -> None:
    data, known = two_places(2)
    fitted = SMALL.fit(data, Evidence("x", rewards=known), device=CPU)
    whole = fitted.label(data, known).rewards
    SMALL.save(fitted, tmp_path / "fitted")
    loaded = SMALL.load(tmp_path / "fitted", device=CPU)
    assert loaded.report == fitted.report
    parts = [
        loaded.label(data.select(range(a, b)), known[5 * a : 5 * b]).rewards for a, b in ((0, 1), (1, 17), (17, 40))
    ]
    assert np.concatenate(parts).tolist() == whole.tolist()
