"""`reward_model`: worked values, what is kept, what is said about itself, and recovery of real rewards."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from data.errors import ConfigurationError, StoreError
from data.readers import recognise
from data.statistics import moments_of
from data.trajectories import Sharded, Trajectories, concatenate
from labelers.evidence import Evidence
from labelers.networks import Networks
from labelers.quality import correlation
from labelers.reward_model import FittedRewardModel, RewardModel, held_out, step_inputs

CPU = torch.device("cpu")
HOPPER = Path(__file__).parents[2] / "examples" / "hopper" / "hopper-replay.hdf5"
SMALL = RewardModel(members=3, hidden=(32, 32), steps=300)


def made(seed: int = 0, lengths: tuple[int, ...] = (30, 1, 20, 40, 25, 34), scale: float = 1) -> Trajectories:
    rng = np.random.default_rng(seed)
    n, e = sum(lengths), len(lengths)
    return Trajectories(
        observations=(rng.normal(size=(n + e, 3)) * scale).astype(np.float32),
        actions=rng.uniform(-1, 1, size=(n, 2)).astype(np.float32),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        terminated=np.arange(e) % 2 == 0,
        truncated=np.arange(e) % 2 == 1,
        final_observed=np.ones(e, bool),
    )


def true_rewards(data: Trajectories) -> np.ndarray:
    """Progress along the first axis and the cost of acting."""
    rows = np.arange(data.n_steps) + data.episode_index
    progress = data.observations[rows + 1][:, 0] - data.observations[rows][:, 0]
    return (progress - 0.1 * (np.asarray(data.actions) ** 2).sum(1)).astype(np.float32)


def partly(rewards: np.ndarray, fraction: float, seed: int = 0) -> np.ndarray:
    known = np.random.default_rng(seed).random(len(rewards)) < fraction
    return np.where(known, rewards, np.float32(np.nan))


def with_outputs(configuration: RewardModel, *outputs: float, low: float = 1, high: float = 3) -> FittedRewardModel:
    """Members that always say these standardised outputs, for labels of mean 2 and standard deviation 1."""
    networks = Networks.of(
        {"weight.0": torch.zeros(len(outputs), 9, 1), "bias.0": torch.tensor(outputs)[:, None, None]}
    )
    return FittedRewardModel(configuration, networks, moments_of(np.zeros((2, 9))), 2, 1, low, high, {})


def test_imputed_rewards_are_the_worked_value() -> None:
    # labels 1 and 3: mean 2, standard deviation 1; members say .2 and .6: 2 + .4, between members .2
    fitted = with_outputs(RewardModel(members=2, hidden=()), 0.2, 0.6)
    mean, std = fitted.predict(np.zeros((1, 9)))
    assert (mean[0], std[0]) == (pytest.approx(2.4), pytest.approx(0.2))


@pytest.mark.parametrize(("pessimism", "imputed"), [(0, 2.4), (1, 2.2), (10, 1)])
def test_pessimism_takes_off_standard_deviations_down_to_the_lowest_known_reward(
    pessimism: float, imputed: float
) -> None:
    fitted = with_outputs(RewardModel(members=2, hidden=(), pessimism=pessimism), 0.2, 0.6)
    assert fitted.label(made()).rewards == pytest.approx(np.full(150, imputed), rel=1e-6)


def test_imputed_rewards_stay_inside_the_known_range() -> None:
    fitted = with_outputs(RewardModel(members=1, hidden=()), 7.0)
    assert set(fitted.label(made()).rewards.tolist()) == {3}


def test_known_rewards_are_kept_to_the_bit_whatever_is_imputed() -> None:
    data = made()
    known = partly(true_rewards(data), 0.3)
    labels = with_outputs(RewardModel(members=2, hidden=()), 0.2, 0.6).label(data, known)
    is_known = ~np.isnan(known)
    assert labels.rewards[is_known].tobytes() == known[is_known].tobytes()
    assert labels.rewards[~is_known] == pytest.approx(2.4)
    assert labels.diagnostics is not None
    assert labels.diagnostics["known"].to_list() == np.add.reduceat(is_known, data.offsets[:-1]).tolist()
    # an episode of one step, and that one known or not
    assert labels.diagnostics["ensemble_std"].to_list() == pytest.approx(
        [0.2, 0 if is_known[30] else 0.2, 0.2, 0.2, 0.2, 0.2]
    )


def test_what_is_held_out_is_judged_by_the_worked_values() -> None:
    found = held_out(np.array([1.0, 2]), np.array([0.5, 1]), np.array([1.5, 0]), baseline=1.0, n_episodes=1)
    # errors .5 and -2; from the mean of the others .5 and -1; in standard deviations 1 and -2
    assert found.rmse == pytest.approx(np.sqrt((0.25 + 4) / 2))
    assert found.rmse_of_mean == pytest.approx(np.sqrt((0.25 + 1) / 2))
    assert found.z_rms == pytest.approx(np.sqrt(2.5))
    assert found.within_2_std == 1
    assert found.pearson == pytest.approx(-1)
    alone = held_out(np.array([1.0, 2]), np.zeros(2), np.array([1.5, 0]), baseline=1.0, n_episodes=1)
    assert alone.z_rms is None and alone.within_2_std is None


def test_standard_deviations_that_are_honest_are_called_calibrated() -> None:
    rng = np.random.default_rng(0)
    std = rng.uniform(0.1, 2, size=10_000)
    found = held_out(np.zeros(10_000), std, rng.normal(size=10_000) * std, baseline=0.0, n_episodes=1)
    assert found.z_rms == pytest.approx(1, abs=0.03)
    assert found.within_2_std == pytest.approx(0.954, abs=0.01)


@pytest.mark.parametrize("next_observations", [True, False])
def test_inputs_are_observation_action_next_observation_and_end(next_observations: bool) -> None:
    data = made()
    # step 31 is the first of episode 2, after an episode of one step: its observation row is 33
    (row,) = step_inputs(data, np.array([31]), next_observations)
    parts = [data.observations[33], data.actions[31], *([data.observations[34]] if next_observations else [])]
    assert row.tolist() == [*np.concatenate(parts).tolist(), 0]
    # the last steps of episode 0, which was terminated, and of episode 1, which was truncated
    assert step_inputs(data, np.array([28, 29, 30]), next_observations)[:, -1].tolist() == [0, 1, 0]


def test_discrete_actions_are_one_hot() -> None:
    data = replace(made(lengths=(2,)), actions=np.array([2, 0]), n_actions=(4,))
    assert step_inputs(data, np.array([0, 1]), False)[:, 3:7].tolist() == [[0, 0, 1, 0], [1, 0, 0, 0]]
    several = replace(data, actions=np.array([[1, 2], [0, 0]]), n_actions=(2, 3))
    assert step_inputs(several, np.array([0, 1]), False)[:, 3:8].tolist() == [[0, 1, 0, 0, 1], [1, 0, 1, 0, 0]]


def test_images_are_flattened() -> None:
    data = replace(made(lengths=(2,)), observations=np.arange(36, dtype=np.uint8).reshape(3, 2, 2, 3))
    assert step_inputs(data, np.array([1]), True)[0].tolist() == [*range(12, 24), *data.actions[1], *range(24, 36), 1]


def test_it_learns_a_reward_of_the_transition_and_says_how_well() -> None:
    data = made(lengths=(50,) * 80)
    rewards = true_rewards(data)
    known = partly(rewards, 0.5)
    fitted = SMALL.fit(data, Evidence("x", rewards=known), device=CPU)
    rest = np.isnan(known)
    found = correlation(fitted.label(data, known).rewards[rest], rewards[rest])
    assert found.pearson is not None and found.pearson > 0.99
    judged = fitted.report["held_out"]
    assert isinstance(judged, dict)
    # Foretold from 200 rewards of 8 episodes: the relative error of a root mean square of 200 is 5 % for normal errors,
    # and more for these.
    error = np.sqrt(np.mean((fitted.label(data, known).rewards[rest] - rewards[rest]) ** 2))
    assert judged["rmse"] == pytest.approx(error, rel=0.25)
    assert judged["n_episodes"] == 8
    assert fitted.report["known"] == (~rest).sum()


def test_a_reward_of_the_end_is_learned_from_a_few_ends() -> None:
    data = made(lengths=(20,) * 100)
    ends = ~data.continues
    rewards = (true_rewards(data) - 3 * ends).astype(np.float32)
    known = partly(rewards, 0.2)
    assert 5 < (~np.isnan(known) & ends).sum() < 20
    labels = SMALL.fit(data, Evidence("x", rewards=known), device=CPU).label(data, known).rewards
    assert np.abs(labels - rewards)[ends & np.isnan(known)].mean() < 0.5


def test_the_same_seed_gives_the_same_bits_and_another_seed_others() -> None:
    data = made()
    known = partly(true_rewards(data), 0.5)

    def labels(seed: int) -> list[float]:
        model = SMALL.model_copy(update={"seed": seed, "steps": 50})
        return model.fit(data, Evidence("x", rewards=known), device=CPU).label(data, known).rewards.tolist()

    assert labels(0) == labels(0) != labels(1)


def test_any_sharding_and_order_of_episodes_gives_the_same_bits() -> None:
    data = made(lengths=(30, 1, 2000, 40, 1100, 34))
    known = partly(true_rewards(data), 0.3)
    fitted = SMALL.model_copy(update={"steps": 50}).fit(data, Evidence("x", rewards=known), device=CPU)
    whole = fitted.label(data, known).rewards
    steps = [np.arange(a, b) for a, b in zip(data.offsets[:-1], data.offsets[1:], strict=True)]
    for shards in ([[0], [1], [2], [3], [4], [5]], [[3, 1, 5], [4, 0, 2]]):
        for episodes in shards:
            rows = np.concatenate([steps[e] for e in episodes])
            assert fitted.label(data.select(episodes), known[rows]).rewards.tolist() == whole[rows].tolist()


def test_only_labelled_rows_are_read_while_fitting() -> None:
    class Counting(Sharded):
        read = 0

        def __getitem__(self, rows: slice | np.ndarray) -> np.ndarray:
            found = super().__getitem__(rows)
            Counting.read += len(found)
            return found

    data = made(lengths=(1000, 1000, 1000))
    known = partly(true_rewards(data), 0.02)
    half = Counting([data.observations[:1500], data.observations[1500:]])
    model = SMALL.model_copy(update={"steps": 20})
    sharded = model.fit(replace(data, observations=half), Evidence("x", rewards=known), device=CPU)
    assert Counting.read == 2 * (~np.isnan(known)).sum()
    plain = model.fit(data, Evidence("x", rewards=known), device=CPU)
    assert sharded.label(data).rewards.tolist() == plain.label(data).rewards.tolist()


def test_ends_without_a_final_observation_are_learned_and_their_episodes_named() -> None:
    complete = made(lengths=(20,) * 100)
    observations = complete.observations.copy()
    last = complete.offsets[1:] + np.arange(100)
    observations[last[::2]] = observations[last[::2] - 1]  # every terminated episode
    data = replace(complete, observations=observations, final_observed=~complete.terminated)
    rewards = np.where(data.continues, true_rewards(complete), -5).astype(np.float32)
    known = partly(rewards, 0.3)
    labels = SMALL.fit(data, Evidence("x", rewards=known), device=CPU).label(data, known)
    ends = ~data.continues & np.isnan(known)
    assert np.abs(labels.rewards[ends] + 5).mean() < 0.5
    assert labels.diagnostics is not None
    assert labels.diagnostics["next_unknown"].to_list() == [True, False] * 50


def test_labels_of_one_episode_are_refused() -> None:
    data = made()
    known = np.full(150, np.nan, np.float32)
    known[:20] = 1
    with pytest.raises(ConfigurationError, match=r"20 known rewards in 1 episode\(s\)"):
        SMALL.fit(data, Evidence("x", rewards=known), device=CPU)


def test_noise_is_not_passed_off_as_a_reward() -> None:
    data = made(lengths=(20,) * 20)
    noise = np.random.default_rng(5).normal(size=400).astype(np.float32)
    # The smallest held-out error of a few steps can be just below that of the mean: train long enough to be wrong.
    with pytest.warns(UserWarning, match="nothing was learned. Label more transitions"):
        RewardModel(members=1, hidden=(64, 64), steps=100, seed=2).fit(
            data, Evidence("x", rewards=partly(noise, 0.3)), device=CPU
        )


def test_rare_rewards_that_no_label_shows_are_warned_of() -> None:
    data = made()
    with pytest.warns(UserWarning, match="every known reward is 0"):
        fitted = SMALL.model_copy(update={"steps": 20}).fit(
            data, Evidence("x", rewards=partly(np.zeros(150, np.float32), 0.5)), device=CPU
        )
    assert not fitted.label(data).rewards.any()


def test_a_constant_column_does_not_become_a_number_of_size_1() -> None:
    # A float32 standard deviation of 1.7 repeated is not 0; a slightly different value later must stay small.
    data = made()
    observations = data.observations.copy()
    observations[:, 1] = 1.7
    constant = replace(data, observations=observations)
    known = partly(true_rewards(constant), 0.5)
    fitted = SMALL.model_copy(update={"steps": 50}).fit(constant, Evidence("x", rewards=known), device=CPU)
    observations = observations.copy()
    observations[:, 1] = 1.7001
    before, after = fitted.label(constant).rewards, fitted.label(replace(data, observations=observations)).rewards
    assert after == pytest.approx(before, abs=1e-3)


def test_saved_and_loaded_it_gives_the_same_bits(tmp_path: Path) -> None:
    data = made()
    known = partly(true_rewards(data), 0.5)
    model = SMALL.model_copy(update={"steps": 50})
    fitted = model.fit(data, Evidence("x", rewards=known), device=CPU)
    path = tmp_path / "fitted.safetensors"
    model.save(fitted, path)
    loaded = model.load(path, device=CPU)
    assert loaded.label(data, known).rewards.tolist() == fitted.label(data, known).rewards.tolist()
    assert loaded.report == fitted.report
    with pytest.raises(StoreError, match="load it with the configuration that it was fitted with"):
        model.model_copy(update={"seed": 1}).load(path, device=CPU)
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(StoreError, match="cannot be read"):
        model.load(path, device=CPU)


def test_one_percent_of_hopper_recovers_the_other_99() -> None:
    with recognise(HOPPER).open(HOPPER) as source:
        blocks = list(source.blocks())
    data = concatenate([block.trajectories for block in blocks])
    rewards = np.concatenate([block.rewards for block in blocks if block.rewards is not None])
    known = np.full(len(rewards), np.nan, np.float32)
    chosen = np.random.default_rng(0).permutation(len(rewards))[: len(rewards) // 100]
    known[chosen] = rewards[chosen]
    fitted = RewardModel(members=3, hidden=(128, 128), steps=500).fit(data, Evidence("x", rewards=known), device=CPU)
    rest = np.isnan(known)
    found = correlation(fitted.label(data, known).rewards[rest], rewards[rest])
    assert found.pearson is not None and found.pearson >= 0.99
