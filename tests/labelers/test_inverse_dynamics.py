"""`inverse_dynamics`: what the model sees, what is kept, what is said about itself, and recovery of real actions."""

from __future__ import annotations

import warnings
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from data.errors import ConfigurationError, DatasetError, StoreError
from data.readers import recognise
from data.statistics import moments_of
from data.trajectories import Sharded, Trajectories, concatenate
from labelers.action_models import Choices, HeldOutActions, HeldOutChoices, SquashedGaussian, explained_variance
from labelers.evidence import Evidence, LabelledActions
from labelers.inverse_dynamics import (
    FittedInverseDynamics,
    InverseDynamics,
    alignment,
    next_observed,
    window_moments,
    windows,
    with_dropout,
)
from labelers.networks import Networks

# Trainings are short here. That actions are late is still an error where no test expects it.
pytestmark = pytest.mark.filterwarnings("ignore:inverse_dynamics. only")

CPU = torch.device("cpu")
FILES = Path(__file__).parent / "files"
SMALL = InverseDynamics(members=2, hidden=(32, 32), steps=300)


def made(lengths: tuple[int, ...], n_actions: tuple[int, ...] | None = None, seed: int = 0) -> Trajectories:
    """Random walks, s' = s + what each action does; every second episode terminates, actions are in -2 .. 2."""
    rng = np.random.default_rng(seed)
    n, e = sum(lengths), len(lengths)
    if n_actions is None:
        actions = rng.uniform(-2, 2, size=(n, 2)).astype(np.float32)
        moves = actions @ rng.normal(size=(2, 4))
    else:
        actions = np.stack([rng.integers(0, k, n) for k in n_actions], axis=1)
        moves = sum(rng.normal(size=(k, 4))[actions[:, d]] for d, k in enumerate(n_actions))
        actions = actions[:, 0] if len(n_actions) == 1 else actions
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    walks = [np.cumsum(np.vstack([rng.normal(size=(1, 4)), moves[a:b]]), axis=0) for a, b in pairwise(offsets)]
    return Trajectories(
        observations=np.concatenate(walks).astype(np.float32),
        actions=actions,
        offsets=offsets,
        terminated=np.arange(e) % 2 == 0,
        truncated=np.arange(e) % 2 == 1,
        final_observed=np.ones(e, bool),
        n_actions=n_actions,
        action_bounds=None if n_actions else (-2.0, 2.0),
    )


def of_episodes(data: Trajectories, known: list[int]) -> np.ndarray:
    """The actions of these episodes; those of the others as evidence says that they are not known."""
    actions = np.array(data.actions)
    actions[~np.isin(data.episode_index, known)] = np.nan if data.n_actions is None else -1
    return actions


def fit(configuration: InverseDynamics, data: Trajectories, known: np.ndarray) -> FittedInverseDynamics:
    return configuration.fit(data, Evidence("x", actions=known), device=CPU)


def read(path: Path) -> Trajectories:
    with recognise(path).open(path) as source:
        return concatenate([block.trajectories for block in source.blocks()])


def saying(data: Trajectories, outputs: list[list[float]]) -> FittedInverseDynamics:
    """Networks that give these outputs [P, n_outputs] whatever they see, for the actions of `data`."""
    model = SquashedGaussian(np.full(2, -2.0), np.full(2, 2.0)) if data.n_actions is None else Choices(data.n_actions)
    biases = torch.tensor(outputs)[:, None]
    networks = Networks.of({"weight.0": torch.zeros(len(outputs), 12, biases.shape[-1]), "bias.0": biases})
    configuration = InverseDynamics(members=len(outputs) // model.networks_per_member, hidden=())
    return FittedInverseDynamics(configuration, model, networks, moments_of(np.zeros((2, 12))), {})


# ---------------------------------------------------------------- what the model sees


def test_a_window_is_the_observation_and_the_changes_around_it_within_the_episode() -> None:
    data = replace(
        made((3, 1)),
        observations=np.array([[0], [1], [4], [9], [50], [75]], np.float32),
        final_observed=np.array([True, False]),
    )
    # two changes that led to each observation, 0 before the start, then the one that follows
    assert windows(data, np.arange(4), 2).tolist() == [[0, 0, 0, 1], [1, 0, 1, 3], [4, 1, 3, 5], [50, 0, 0, 25]]
    assert windows(data, np.array([2, 0]), 0).tolist() == [[4, 5], [0, 1]]
    assert next_observed(data).tolist() == [True, True, True, False]


def test_changes_of_images_do_not_wrap_around() -> None:
    data = replace(made((2,)), observations=np.array([[[0, 9]], [[255, 8]], [[1, 8]]], np.uint8))
    assert windows(data, np.arange(2), 0).tolist() == [[0, 9, 255, -1], [255, 8, -254, 0]]


def test_inputs_are_standardised_over_all_episodes_with_or_without_actions() -> None:
    data = made((30, 20, 25))
    known = of_episodes(data, [0, 1])
    fitted = fit(SMALL.model_copy(update={"steps": 1}), data, known)
    everything = moments_of(windows(data, np.arange(75), 1))
    assert fitted.input_moments.mean == pytest.approx(everything.mean)
    assert fitted.input_moments.std == pytest.approx(everything.std)


def test_rounding_of_a_constant_column_is_not_blown_up() -> None:
    data = made((30, 20))
    observations = np.array(data.observations)
    observations[:, 1] = np.where(np.arange(52) % 2, np.float32(1.7), np.nextafter(np.float32(1.7), np.float32(2)))
    moments = window_moments(replace(data, observations=observations), past=1)
    assert moments.constant.tolist() == [False, True, False, False] * 3
    assert (moments.std[1::4] == 0).all()


def test_a_model_of_one_transition_and_one_of_many_are_both_learned() -> None:
    data = made((40,) * 20)
    for past in (0, 3):
        configuration = InverseDynamics(past_transitions=past, members=1, hidden=(64, 64), steps=500)
        found = HeldOutActions.model_validate(fit(configuration, data, np.asarray(data.actions)).report["held_out"])
        assert found.r2 is not None and found.r2 > 0.9


def test_a_tenth_of_hidden_units_is_left_out_and_made_up_for() -> None:
    # a hidden layer of 50 ones, summed: a row says 1 / .9 for each unit that stays
    networks = Networks.of(
        {
            "weight.0": torch.ones(4, 1, 50),
            "bias.0": torch.zeros(4, 1, 50),
            "weight.1": torch.ones(4, 50, 1),
            "bias.1": torch.zeros(4, 1, 1),
        }
    )
    draws = [torch.Generator().manual_seed(seed) for seed in (0, 1)]
    kept = with_dropout(networks, torch.ones(4, 1000, 1), draws).squeeze(-1) * 0.9
    torch.testing.assert_close(kept, kept.round())
    # 50,000 units a network: a standard error of .0013
    assert (kept / 50).mean(1).tolist() == pytest.approx([0.9] * 4, abs=0.006)
    assert not any(torch.equal(kept[p], kept[q]) for p in range(4) for q in range(p))


def test_a_member_trains_as_if_alone() -> None:
    data = made((30, 20, 25))
    known = of_episodes(data, [0, 1])
    alone, among = (
        fit(InverseDynamics(members=m, hidden=(8,), steps=60), data, known).networks.weights[0] for m in (1, 3)
    )
    assert alone[0].numpy() == pytest.approx(among[0].numpy(), abs=1e-4)  # means; batched products round otherwise
    assert alone[1].numpy() == pytest.approx(among[3].numpy(), abs=1e-4)  # log sigmas


# ---------------------------------------------------------------- what it says


def test_proxies_are_the_worked_value_and_known_actions_stay_to_the_bit() -> None:
    data = made((3, 1, 2))
    known = of_episodes(data, [1])
    known[3] = [1.2345678, 5]  # outside the bounds: what is known is not corrected
    # members say tanh .2 and tanh .6, and a wide -.3; log sigma -1.5
    labels = saying(data, [[0.2, -0.3], [0.6, -0.3], [0.0, 0.0], [0.0, 0.0]]).label(data, known)
    assert labels.actions[[0, 1, 2, 4, 5]] == pytest.approx(
        np.tile([np.tanh(0.2) + np.tanh(0.6), 2 * np.tanh(-0.3)], (5, 1)), rel=1e-6
    )
    assert labels.actions[3].tobytes() == known[3].tobytes()
    assert labels.diagnostics is not None
    assert labels.diagnostics["known"].to_list() == [0, 1, 0]
    between = ((np.tanh(0.6) - np.tanh(0.2)) / 2) ** 2
    variance = np.exp(-3) + between / 2  # of the two dimensions members differ in one
    assert labels.diagnostics["uncertainty"].to_list() == pytest.approx([variance, 0, variance])


def test_proxies_stay_inside_the_range_of_known_actions_where_no_bounds_are_declared() -> None:
    data = replace(made((40,) * 6), action_bounds=None)
    known = of_episodes(data, [0, 1, 2])
    inside = np.clip(known, -0.5, 0.7)
    labels = fit(SMALL, data, inside).label(data).actions
    assert labels.min() >= np.float32(-0.5) and labels.max() <= np.float32(0.7)
    labels = saying(data, [[50.0, -50.0], [0.0, 0.0]]).label(data).actions
    assert np.unique(labels, axis=0).tolist() == [[2, -2]]


@pytest.mark.parametrize("n_actions", [(5,), (3, 2)])
def test_discrete_actions_are_learned_and_keep_their_dtype_and_shape(n_actions: tuple[int, ...]) -> None:
    data = made((40,) * 10, n_actions)
    known = of_episodes(data, [0, 2, 4, 6])
    fitted = fit(SMALL, data, known)
    labels = fitted.label(data, known)
    labels.check(data)
    assert (labels.actions == data.actions).mean() > 0.95
    assert labels.actions[known != -1].tolist() == data.actions[known != -1].tolist()
    found = HeldOutChoices.model_validate(fitted.report["held_out"])
    assert found.accuracy > 0.9 and len(found.accuracy_per_dimension) == len(n_actions)
    assert labels.diagnostics is not None
    assert [0 < doubt < 0.4 for doubt in labels.diagnostics["uncertainty"]] == [
        e not in (0, 2, 4, 6) for e in range(10)
    ]


def test_how_well_others_are_foretold_is_known_from_the_held_out_episodes() -> None:
    data = made((40,) * 30)
    known = of_episodes(data, [*range(20)])
    fitted = fit(SMALL, data, known)
    rest = data.episode_index >= 20
    truth = np.asarray(data.actions)[rest].astype(np.float64)
    r2 = explained_variance(fitted.label(data, known).actions[rest] - truth, truth)
    found = HeldOutActions.model_validate(fitted.report["held_out"])
    assert found.r2 is not None and r2 is not None
    assert r2 > 0.95
    assert found.r2 == pytest.approx(r2, abs=0.03)
    assert (found.n, found.n_episodes, fitted.report["known"]) == (80, 2, 800)


def test_training_stops_when_it_no_longer_helps_and_the_best_weights_are_kept() -> None:
    data = made((30,) * 8)
    noise = of_episodes(data, [*range(6)])
    noise = np.random.default_rng(0).permutation(noise[~np.isnan(noise).any(1)])
    known = of_episodes(data, [*range(6)])
    known[~np.isnan(known).any(1)] = noise
    configuration = InverseDynamics(members=1, hidden=(64, 64), steps=2000)
    done: list[int] = []
    with pytest.warns(UserWarning, match="is foretold"):
        fitted = configuration.fit(data, Evidence("x", actions=known), device=CPU, progress=done.append)
    (best_step,) = fitted.report["best_step"]  # type: ignore[union-attr, misc]
    assert best_step <= 500 and len(done) == best_step / 100 + 5
    # uniform actions have log likelihood -1.39; weights of five checks later lie far below
    found = HeldOutActions.model_validate(fitted.report["held_out"])
    assert found.log_likelihood > -2.5


# ---------------------------------------------------------------- what is missing, late, or too little


def test_steps_without_a_next_observation_are_not_trained_on_and_their_proxies_counted() -> None:
    data = made((30, 1, 20, 25, 30))
    data = replace(data, final_observed=np.array([False, False, True, False, True]))
    known = of_episodes(data, [0, 1, 2])
    fitted = fit(SMALL.model_copy(update={"steps": 50}), data, known)
    assert (fitted.report["known"], fitted.report["next_unknown"]) == (51, 2)
    labels = fitted.label(data, known)
    assert labels.diagnostics is not None
    assert labels.diagnostics["next_unknown"].to_list() == [0, 0, 0, 1, 0]
    other = known.copy()
    other[[29, 30]] = [[1, 0], [0, 1]]
    again = fit(SMALL.model_copy(update={"steps": 50}), data, other)
    assert again.label(data).actions.tobytes() == fitted.label(data).actions.tobytes()


def test_actions_of_one_episode_are_refused() -> None:
    data = made((30, 20, 25))
    with pytest.raises(ConfigurationError, match=r"30 known actions with a next observation, in 1 episode\(s\)"):
        fit(SMALL, data, of_episodes(data, [0]))


def test_an_episode_whose_only_next_observation_is_unknown_does_not_count() -> None:
    data = replace(made((30, 1)), final_observed=np.array([True, False]))
    with pytest.raises(ConfigurationError, match="at least two must have known actions: raise `fraction`"):
        fit(SMALL, data, of_episodes(data, [0, 1]))


@pytest.mark.parametrize(
    ("file", "as_they_are", "one_row_up"),
    [("actions_aligned.hdf5", 1, 0.01309), ("actions_late.hdf5", 0.0116528714, 1)],
)
def test_a_linear_model_tells_late_actions_from_others(file: str, as_they_are: float, one_row_up: float) -> None:
    data = read(FILES / file)
    found = alignment(data, np.asarray(data.actions))
    assert found == (pytest.approx(as_they_are, rel=1e-4), pytest.approx(one_row_up, rel=1e-3))


@pytest.mark.parametrize("past", [0, 1])
def test_actions_recorded_one_row_late_are_warned_of_though_a_model_of_the_past_foretells_them(past: int) -> None:
    late, configuration = read(FILES / "actions_late.hdf5"), SMALL.model_copy(update={"past_transitions": past})
    with pytest.warns(UserWarning, match=r"one row late: a linear model explains 0\.01 .* and 1\.00 of them moved"):
        fitted = fit(configuration, late, np.asarray(late.actions))
    found = HeldOutActions.model_validate(fitted.report["held_out"])
    assert found.r2 is not None and (found.r2 > 0.8) == (past == 1)
    aligned = read(FILES / "actions_aligned.hdf5")
    with warnings.catch_warnings(action="error"):
        fitted = fit(configuration, aligned, np.asarray(aligned.actions))
    found = HeldOutActions.model_validate(fitted.report["held_out"])
    assert found.r2 is not None and found.r2 > 0.8


def test_late_discrete_actions_are_warned_of_too() -> None:
    data = made((40,) * 6, (3, 2))
    late = np.array(data.actions)
    late[1:] = late[:-1]
    late[data.offsets[:-1]] = 0
    with pytest.warns(UserWarning, match="one row late"):
        fit(SMALL, replace(data, actions=late), late)


def test_actions_that_observations_do_not_show_are_warned_of_in_other_words() -> None:
    data = made((30,) * 6)
    unseen = replace(data, observations=np.random.default_rng(0).normal(size=(186, 4)).astype(np.float32))
    with pytest.warns(UserWarning, match=r"only -?0\.\d\d of the actions .* do not seem to be recorded one row late"):
        fit(SMALL.model_copy(update={"steps": 100}), unseen, of_episodes(data, [0, 1, 2, 3]))
    # 20 steps, 40 columns: least squares would explain anything
    wide = replace(made((4,) * 5), observations=np.random.default_rng(0).normal(size=(25, 40)).astype(np.float32))
    with pytest.warns(UserWarning, match=r"is foretold\. Observations may not show what was done"):
        fit(SMALL.model_copy(update={"steps": 100}), wide, np.asarray(wide.actions))


# ---------------------------------------------------------------- the same again


def test_the_same_seed_gives_the_same_bits_and_another_seed_others() -> None:
    data = made((30, 20, 25, 30))
    known = of_episodes(data, [0, 1, 2])

    def labels(seed: int) -> list[float]:
        return fit(SMALL.model_copy(update={"seed": seed, "steps": 50}), data, known).label(data).actions.tolist()

    assert labels(0) == labels(0) != labels(1)


@pytest.mark.parametrize("n_actions", [None, (3, 2)])
def test_any_sharding_and_order_of_episodes_gives_the_same_bits(n_actions: tuple[int, ...] | None) -> None:
    data = made((30, 1, 1500, 40, 1100, 34), n_actions)
    known = of_episodes(data, [0, 3, 5])
    fitted = fit(SMALL.model_copy(update={"steps": 20}), data, known)
    whole = fitted.label(data, known).actions
    steps = [np.arange(a, b) for a, b in zip(data.offsets[:-1], data.offsets[1:], strict=True)]
    for shards in ([[0], [1], [2], [3], [4], [5]], [[3, 1, 5], [4, 0, 2]]):
        for episodes in shards:
            rows = np.concatenate([steps[e] for e in episodes])
            assert fitted.label(data.select(episodes), known[rows]).actions.tobytes() == whole[rows].tobytes()


def test_columns_in_several_files_give_the_same_bits() -> None:
    data = made((30, 20, 25, 30))
    known = of_episodes(data, [0, 1, 2])
    configuration = SMALL.model_copy(update={"steps": 20})
    halves = Sharded([data.observations[:50], data.observations[50:]])
    sharded = replace(data, observations=halves)
    plain, other = fit(configuration, data, known), fit(configuration, sharded, known)
    assert plain.label(data).actions.tobytes() == other.label(sharded).actions.tobytes()


@pytest.mark.parametrize("n_actions", [None, (5,), (3, 2)])
def test_saved_and_loaded_it_gives_the_same_bits(n_actions: tuple[int, ...] | None, tmp_path: Path) -> None:
    data = made((30, 20, 25, 30), n_actions)
    known = of_episodes(data, [0, 1, 2])
    configuration = SMALL.model_copy(update={"steps": 20})
    fitted = fit(configuration, data, known)
    path = tmp_path / "fitted.safetensors"
    configuration.save(fitted, path)
    loaded = configuration.load(path, device=CPU)
    assert loaded.label(data, known).actions.tobytes() == fitted.label(data, known).actions.tobytes()
    assert loaded.report == fitted.report
    with pytest.raises(StoreError, match="load it with the configuration that it was fitted with"):
        configuration.model_copy(update={"past_transitions": 2}).load(path, device=CPU)
    with pytest.raises(ValueError, match="networks of"):
        configuration.model_copy(update={"hidden": (8,)}).restore(fitted.state(), {}, device=CPU)


def test_labels_of_another_kind_of_action_are_refused() -> None:
    data = made((30, 20))
    labels = saying(data, [[0.0, 0.0], [0.0, 0.0]]).label(data)
    with pytest.raises(DatasetError, match="they must be alike"):
        labels.check(made((30, 20), (3, 2)))


# ---------------------------------------------------------------- real actions


def recovered(configuration: InverseDynamics, replay: Path) -> float:
    """R2 of the actions of the nine tenths of episodes that are not labelled."""
    data = read(replay)

    class Replay:
        def trajectories(self, name: str) -> Trajectories:
            return data

        def rewards(self, name: str, labels: str) -> np.ndarray:
            raise AssertionError

        def demonstrations_of_dataset(self) -> str | None:
            raise AssertionError

    evidence = LabelledActions().resolve(Replay())
    assert evidence.actions is not None
    labels = configuration.fit(data, evidence, device=CPU).label(data, evidence.actions).actions
    rest = np.isnan(evidence.actions).any(1)
    truth = np.asarray(data.actions)[rest].astype(np.float64)
    r2 = explained_variance(labels[rest] - truth, truth)
    assert r2 is not None
    return r2


def test_a_tenth_of_hopper_tells_much_of_the_rest_in_a_few_seconds(hopper: Path) -> None:
    quick = InverseDynamics(members=1, hidden=(128, 128), steps=600)
    assert recovered(quick, hopper / "hopper-replay.hdf5") > 0.8


@pytest.mark.drill
def test_a_tenth_of_hopper_tells_nine_tenths_of_the_rest(hopper: Path) -> None:
    assert recovered(InverseDynamics(), hopper / "hopper-replay.hdf5") >= 0.9
