"""`preference`: closed forms, what is kept and said, and recovery of rewards from preferences alone."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from data.errors import ConfigurationError, StoreError
from data.findings import Finding, Severity
from data.labels import episode_returns
from data.readers import recognise
from data.statistics import moments_of
from data.trajectories import Sharded, Trajectories, concatenate
from labelers.evidence import Evidence, Preferences
from labelers.networks import Networks
from labelers.preference import FittedPreference, Preference, held_out
from labelers.preferences import Annotator
from labelers.quality import correlation
from labelers.segment_models import StepModel

CPU = torch.device("cpu")
HOPPER = Path(__file__).parents[2] / "examples" / "hopper" / "hopper-replay.hdf5"
SMALL = Preference(members=2, hidden=(16,), steps=60)
MODELS: tuple[Literal["mlp", "transformer"], ...] = ("mlp", "transformer")


def made(seed: int = 0, lengths: tuple[int, ...] = (30, 3, 20, 40, 1, 34)) -> Trajectories:
    rng = np.random.default_rng(seed)
    n, e = sum(lengths), len(lengths)
    return Trajectories(
        observations=rng.normal(size=(n + e, 3)).astype(np.float32),
        actions=rng.uniform(-1, 1, size=(n, 2)).astype(np.float32),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        terminated=np.arange(e) % 2 == 0,
        truncated=np.arange(e) % 2 == 1,
        final_observed=np.ones(e, bool),
    )


def true_rewards(data: Trajectories) -> np.ndarray:
    """Of the first number observed and the cost of acting."""
    return (data.step_observations[:, 0] - 0.1 * (np.asarray(data.actions) ** 2).sum(1)).astype(np.float32)


class Lookup:
    """A dataset and its rewards."""

    def __init__(self, data: Trajectories, rewards: np.ndarray) -> None:
        self._data, self._rewards = data, rewards

    def trajectories(self, name: str) -> Trajectories:
        return self._data

    def rewards(self, name: str, labels: str) -> np.ndarray:
        return self._rewards

    def demonstrations_of_dataset(self) -> str | None:
        return None


def evidence(data: Trajectories, rewards: np.ndarray | None = None, **settings: object) -> Evidence:
    annotator = Annotator.model_validate({"pairs": 100, "length": 5, **settings})
    return annotator.resolve(Lookup(data, true_rewards(data) if rewards is None else rewards))


pytestmark = [
    pytest.mark.filterwarnings("ignore:.*are shorter than segments"),
    pytest.mark.filterwarnings("ignore:.*nothing was learned"),
]


def test_two_segments_are_as_far_apart_as_the_log_odds_of_the_stated_probability() -> None:
    # Steps of two sorts; a step of the first is better with probability .8: the maximum of the likelihood is at
    # a difference of log(.8 / .2) = 1.386, and over segments of two steps of one sort at half of that a step.
    sort = np.repeat([0, 1, 0, 1], 20)
    observations = np.repeat([[0.0], [1.0], [0.0], [1.0]], 21, axis=0).astype(np.float32)
    data = replace(made(lengths=(20,) * 4), observations=observations, actions=np.zeros((80, 1), np.float32))
    data = replace(data, terminated=np.zeros(4, bool), truncated=np.ones(4, bool))
    for length in (1, 2):
        starts = np.stack([np.arange(0, 18), np.arange(20, 38)], axis=1)
        stated = Preferences(starts, length, np.full(18, 0.8, np.float32))
        model = Preference(members=2, hidden=(16,), steps=500, normalise=False)
        labels = model.fit(data, Evidence("x", preferences=stated), device=CPU).label(data).rewards
        apart = labels[sort == 0].mean() - labels[sort == 1].mean()
        assert apart == pytest.approx(math.log(4) / length, rel=1e-3)


def test_ties_alone_leave_nothing_apart() -> None:
    data = made()
    stated = evidence(data).preferences
    assert stated is not None
    ties = Evidence("x", preferences=replace(stated, first_better=np.full(100, 0.5, np.float32)))
    plain = SMALL.model_copy(update={"normalise": False, "steps": 300})
    by_ties = plain.fit(data, ties, device=CPU).label(data).rewards
    by_preferences = plain.fit(data, evidence(data), device=CPU).label(data).rewards
    assert by_ties.std() < 0.1 * by_preferences.std()


def saying(configuration: Preference, *members: list[float]) -> tuple[FittedPreference, Trajectories]:
    """Members that say these numbers of the steps of one episode, whose observation is one-hot."""
    n = len(members[0])
    weight = torch.zeros(len(members), n + 2, 1)
    weight[:, :n, 0] = torch.tensor(members)
    networks = Networks.of({"weight.0": weight, "bias.0": torch.zeros(len(members), 1, 1)})
    data = replace(
        made(lengths=(n,)),
        observations=np.eye(n + 1, n, dtype=np.float32),
        actions=np.zeros((n, 1), np.float32),
        terminated=np.zeros(1, bool),
        truncated=np.ones(1, bool),
    )
    # mean 0 and standard deviation 1 in every column: inputs stay as they are
    moments = moments_of(np.stack([np.full(n + 2, -1.0), np.full(n + 2, 1.0)]))
    ones = np.ones(len(members))
    return FittedPreference(configuration, StepModel({"rewards": networks}), moments, 0 * ones, ones, 0.0, {}), data


MEMBERS = ([0.1, 0.4, 0.7, 0.2], [-0.5, 0.5, 0.9, -0.1], [0.30, 0.31, 0.32, 0.29])


@pytest.mark.parametrize(
    ("normalise", "zero", "rewards"),
    [
        # each member to mean 0 and standard deviation 1 over the four steps, then the mean: .1 becomes -1.091 (mean
        # .35, std .2291), -.5 becomes -1.299, .30 becomes -.447
        (True, "mean", [-0.94605680, 0.40750583, 1.38967780, -0.85112682]),
        (True, "lowest", [0, 1.35356263, 2.33573460, 0.09492998]),
        # plain means -.0333, .4033, .64, .13, less their mean .285
        (False, "mean", [-0.31833333, 0.11833333, 0.355, -0.155]),
        (False, "lowest", [0, 0.43666667, 0.67333333, 0.16333333]),
    ],
)
def test_members_are_averaged_as_in_the_worked_values(
    normalise: bool, zero: Literal["lowest", "mean"], rewards: list[float]
) -> None:
    fitted, data = saying(Preference(members=3, hidden=(), normalise=normalise, zero=zero), *MEMBERS)
    fitted.measure(data)
    assert fitted.label(data).rewards.tolist() == pytest.approx(rewards, abs=1e-6)


def test_a_member_that_says_the_same_of_every_step_counts_as_0_and_is_warned_of() -> None:
    fitted, data = saying(Preference(members=2, hidden=(), zero="mean"), MEMBERS[0], [0.3, 0.3, 0.3, 0.3])
    with pytest.warns(UserWarning, match="1 of 2 members say the same of every step and count as 0"):
        fitted.measure(data)
    # half of (.1 - .35) / .2291288 and so on
    assert fitted.label(data).rewards.tolist() == pytest.approx([-0.5455447, 0.1091089, 0.7637626, -0.3273268])


def test_what_is_held_out_is_judged_by_the_worked_values() -> None:
    found = held_out(np.array([0.9, 0.4, 0.8, 0.5]), np.array([1.0, 1.0, 0.0, 0.5]))
    # winners: right, wrong, wrong; how sure: .9, .6, .8; the tie counts in the loss alone
    assert (found.n, found.n_ties) == (4, 1)
    assert found.accuracy == pytest.approx(1 / 3)
    assert found.confidence == pytest.approx(2.3 / 3)
    assert found.loss == pytest.approx(-(math.log(0.9) + math.log(0.4) + math.log(0.2) + math.log(0.5)) / 4)
    # bins .5-.6-.7-.8-.9-1; each holds one pair: |1 - .9|, |0 - .6|, |0 - .8|
    assert found.calibration_error == pytest.approx(1.5 / 3)
    # 0.105, 0.916, 1.609, 0.693: population standard deviation .5382, over sqrt(3)
    assert found.loss_error == pytest.approx(0.3107513)
    ties = held_out(np.array([0.9]), np.array([0.5]))
    assert ties.accuracy is ties.confidence is ties.calibration_error is None
    assert ties.loss_error == 0


def test_confidence_that_is_honest_is_called_calibrated() -> None:
    rng = np.random.default_rng(0)
    probability = rng.uniform(size=20_000)
    found = held_out(probability, (rng.random(20_000) < probability).astype(np.float64))
    assert found.accuracy == pytest.approx(found.confidence, abs=0.01)
    assert found.calibration_error is not None and found.calibration_error < 0.02


@pytest.mark.parametrize("model", MODELS)
def test_it_learns_a_reward_from_preferences_alone(model: Literal["mlp", "transformer"]) -> None:
    data = made(lengths=(30,) * 40)
    labeler = Preference(members=2, hidden=(32,), model=model, steps=200)
    fitted = labeler.fit(data, evidence(data, pairs=400), device=CPU)
    found = correlation(fitted.label(data).rewards, true_rewards(data))
    assert found.pearson is not None and found.pearson > (0.95 if model == "mlp" else 0.8)
    judged = fitted.report["held_out"]
    assert isinstance(judged, dict)
    assert judged["n"] == 40
    assert isinstance(accuracy := judged["accuracy"], float) and accuracy > 0.8


def test_flipped_answers_do_not_turn_the_rewards_round() -> None:
    data = made(lengths=(30,) * 40)
    labeler = Preference(members=3, hidden=(32,), steps=200)
    answers = evidence(data, pairs=400, error_rate=0.2, tie=0.5)
    found = correlation(labeler.fit(data, answers, device=CPU).label(data).rewards, true_rewards(data))
    assert found.pearson is not None and found.pearson > 0.8
    assert answers.preferences is not None
    opposite = replace(answers.preferences, first_better=1 - answers.preferences.first_better)
    fitted = labeler.fit(data, Evidence("x", preferences=opposite), device=CPU)
    turned = correlation(fitted.label(data).rewards, true_rewards(data))
    assert turned.pearson is not None and turned.pearson < -0.8


def test_a_transformer_sees_what_went_before() -> None:
    # Every episode begins with a signal, 1 or -1, that is seen once and says what a number observed later is worth.
    data = made(lengths=(6,) * 200)
    observations = data.observations.copy().reshape(200, 7, 3)
    observations[:, :, 1] = 0
    observations[:, 0, 1] = np.random.default_rng(1).choice([-1, 1], 200)
    rewards = (observations[:, :6, 0] * observations[:, :1, 1]).ravel()
    data = replace(data, observations=observations.reshape(-1, 3))
    answers = evidence(data, rewards, pairs=600, length=6)

    def agreement(model: Literal["mlp", "transformer"]) -> float:
        labeler = Preference(members=2, hidden=(32,), model=model)
        found = correlation(labeler.fit(data, answers, device=CPU).label(data).rewards, rewards)
        assert found.pearson is not None
        return found.pearson

    # seen alone, a sixth of the steps is explained: those with the signal
    assert agreement("mlp") < 0.4
    assert agreement("transformer") > 0.6


@pytest.mark.parametrize("model", MODELS)
def test_the_same_seed_gives_the_same_bits_and_another_seed_others(model: Literal["mlp", "transformer"]) -> None:
    data = made()

    def labels(seed: int) -> list[float]:
        labeler = SMALL.model_copy(update={"seed": seed, "steps": 20, "model": model})
        return labeler.fit(data, evidence(data), device=CPU).label(data).rewards.tolist()

    assert labels(0) == labels(0) != labels(1)


@pytest.mark.parametrize("model", MODELS)
def test_any_sharding_and_order_of_episodes_gives_the_same_bits(model: Literal["mlp", "transformer"]) -> None:
    data = made()
    labeler = SMALL.model_copy(update={"steps": 20, "model": model})
    fitted = labeler.fit(data, evidence(data), device=CPU)
    whole = fitted.label(data).rewards
    steps = [np.arange(a, b) for a, b in zip(data.offsets[:-1], data.offsets[1:], strict=True)]
    for shards in ([[0], [1], [2], [3], [4], [5]], [[3, 1, 5], [4, 0, 2]]):
        for episodes in shards:
            rows = np.concatenate([steps[e] for e in episodes])
            assert fitted.label(data.select(episodes)).rewards.tolist() == whole[rows].tolist()


@pytest.mark.parametrize("model", MODELS)
def test_saved_and_loaded_it_gives_the_same_bits(model: Literal["mlp", "transformer"], tmp_path: Path) -> None:
    data = made()
    labeler = SMALL.model_copy(update={"steps": 20, "model": model})
    fitted = labeler.fit(data, evidence(data), device=CPU)
    path = tmp_path / "fitted.safetensors"
    labeler.save(fitted, path)
    loaded = labeler.load(path, device=CPU)
    assert loaded.label(data).rewards.tolist() == fitted.label(data).rewards.tolist()
    assert loaded.report == fitted.report
    with pytest.raises(StoreError, match="load it with the configuration that it was fitted with"):
        labeler.model_copy(update={"seed": 1}).load(path, device=CPU)


def test_a_transformer_depends_on_no_more_steps_than_a_segment_has() -> None:
    data = made()
    labeler = SMALL.model_copy(update={"steps": 20, "model": "transformer"})
    fitted = labeler.fit(data, evidence(data), device=CPU)
    before = fitted.label(data).rewards
    observations = data.observations.copy()
    observations[10] += 1  # step 10 of the first episode; segments have 5 steps
    changed = np.flatnonzero(fitted.label(replace(data, observations=observations)).rewards != before)
    assert changed.tolist() == [10, 11, 12, 13, 14]


def test_the_worst_step_gets_0_unless_the_mean_is_asked_for() -> None:
    data = made()
    lowest = SMALL.fit(data, evidence(data), device=CPU).label(data).rewards
    mean = SMALL.model_copy(update={"zero": "mean"}).fit(data, evidence(data), device=CPU).label(data).rewards
    assert lowest.min() == pytest.approx(0, abs=1e-6)
    assert mean.mean() == pytest.approx(0, abs=1e-6)
    assert (lowest - mean) == pytest.approx(np.full(data.n_steps, -mean.min()), abs=1e-5)


def test_rows_of_a_mapped_dataset_give_the_same_labels() -> None:
    data = made()
    sharded = replace(data, observations=Sharded([data.observations[:50], data.observations[50:]]))
    a, b = (SMALL.fit(d, evidence(data), device=CPU).label(d).rewards.tolist() for d in (data, sharded))
    assert a == b


def test_what_was_found_is_warned_of_and_reported() -> None:
    data = made()
    stated = evidence(data).preferences
    assert stated is not None
    odd = [
        Finding(code="segment-outside-dataset", severity=Severity.WARNING, message=f"pair {n} is not used.")
        for n in range(12)
    ]
    note = Finding(code="pair-repeated", severity=Severity.NOTE, message="pair 3 again.")
    with pytest.warns(UserWarning, match=r"pair 0 is not used\. pair 1 .* pair 9 is not used\. And 2 more\.$"):
        fitted = SMALL.fit(data, Evidence("x", preferences=replace(stated, findings=(*odd, note))), device=CPU)
    assert fitted.report["findings"] == [finding.model_dump(mode="json") for finding in (*odd, note)]
    assert fitted.report["pairs"] == 100


def test_the_same_two_segments_are_never_on_both_sides_of_the_split() -> None:
    starts = np.array([[0, 10], [10, 0], [0, 10], [20, 5], [5, 20], [40, 60]])
    stated = Preferences(starts, 3, np.array([1, 0, 1, 0, 1, 1], np.float32))
    for seed in range(10):
        out = Preference(seed=seed)._held_out(stated)
        assert out[0] == out[1] == out[2] and out[3] == out[4]
        assert 0 < out.sum() < 6


def test_preferences_between_the_same_two_segments_are_refused() -> None:
    stated = Preferences(np.array([[0, 10], [10, 0]]), 3, np.array([1, 0], np.float32))
    with pytest.raises(ConfigurationError, match="all preferences are between the same two segments"):
        SMALL.fit(made(), Evidence("x", preferences=stated), device=CPU)


def test_answers_that_mean_nothing_are_not_passed_off_as_a_reward() -> None:
    data = made(lengths=(30,) * 10)
    noise = np.random.default_rng(3).normal(size=300).astype(np.float32)
    with pytest.warns(UserWarning, match="nothing was learned. State more preferences"):
        SMALL.fit(data, evidence(data, noise, error_rate=0.5), device=CPU)


def test_widths_that_heads_cannot_share_are_refused() -> None:
    with pytest.raises(ValidationError, match="divided among 4 heads"):
        Preference(model="transformer", hidden=(30,))
    with pytest.raises(ValidationError, match="divided among 4 heads"):
        Preference(model="transformer", hidden=())


def test_500_pairs_of_hopper_rank_its_episodes() -> None:
    with recognise(HOPPER).open(HOPPER) as source:
        blocks = list(source.blocks())
    data = concatenate([block.trajectories for block in blocks])
    rewards = np.concatenate([block.rewards for block in blocks if block.rewards is not None])
    answers = evidence(data, rewards, pairs=500, length=20)
    labels = Preference(steps=150).fit(data, answers, device=CPU).label(data).rewards
    returns = [episode_returns(r, data.offsets) for r in (labels, rewards)]
    steps, episodes = correlation(labels, rewards), correlation(*returns)
    assert episodes.spearman is not None and episodes.spearman >= 0.9
    # Rewards of 1 a step rank hopper's episodes too, but tell no step from another.
    assert steps.pearson is not None and steps.pearson >= 0.9
