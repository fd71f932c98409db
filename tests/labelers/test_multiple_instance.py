"""`multiple_instance`: LSTMs by hand, bags of any length in units of their returns, and rewards that hang on memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.bags import remembered
from data.errors import ConfigurationError, StoreError
from data.labels import episode_returns
from data.trajectories import Trajectories
from labelers.evidence import Evidence
from labelers.multiple_instance import (
    BAGS,
    CHUNK,
    BagNetwork,
    Bags,
    FittedMultipleInstance,
    ModelName,
    MultipleInstance,
    differences,
)
from labelers.quality import correlation

pytestmark = pytest.mark.filterwarnings("ignore:.*nothing was learned")  # most here train for a few steps only

CPU = torch.device("cpu")
FILES = Path(__file__).parent / "files"
MODELS: tuple[ModelName, ...] = get_args(ModelName)
Make = Callable[..., Trajectories]


def fit(data: Trajectories, returns: np.ndarray, **settings: object) -> FittedMultipleInstance:
    labeler = MultipleInstance.model_validate({"members": 2, "hidden": 4, "steps": 20, **settings})
    return labeler.fit(data, Evidence("x", returns=np.asarray(returns, np.float64)), device=CPU)


def network(model: ModelName, width: int = 3, hidden: int = 2) -> BagNetwork:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return BagNetwork(model, width, hidden)


def by_hand(network: BagNetwork, inputs: np.ndarray) -> list[float]:
    """Rewards of one bag [T, D], written out step by step after the paper, in float64."""
    tensors = {name: t.double().numpy() for name, t in network.state_dict().items()}

    def layers(part: str, x: np.ndarray, *, last_is_linear: bool) -> np.ndarray:
        for i in (0, 2, 4):
            x = tensors[f"{part}.{i}.weight"] @ x + tensors[f"{part}.{i}.bias"]
            if not (last_is_linear and i == 4):
                x = np.maximum(x, 0)
        return x

    def sigmoid(x: np.ndarray) -> np.ndarray:
        return 1 / (1 + np.exp(-x))

    rewards, before = [], 0.0
    h = c = np.zeros(2)
    for x in inputs.astype(np.float64):
        e = layers("encoder", x, last_is_linear=False)
        if network.model != "instance_space_nn":
            gates = tensors["memory.weight_ih_l0"] @ e + tensors["memory.bias_ih_l0"]
            gates += tensors["memory.weight_hh_l0"] @ h + tensors["memory.bias_hh_l0"]
            i, f, g, o = np.split(gates, 4)
            c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
            h = sigmoid(o) * np.tanh(c)
        seen = {"instance_space_nn": e, "csc_instance_space_lstm": np.concatenate([e, h])}.get(network.model, h)
        said = float(layers("head", seen, last_is_linear=True)[0])
        rewards.append(said - before)
        if network.model == "embedding_space_lstm":
            before = said
    return rewards


def test_steps_of_an_embedding_space_are_differences_of_its_predictions() -> None:
    said = torch.tensor([[0.5, 1.25, 1.0, 3.0]])
    # .5 - 0, 1.25 - .5, 1 - 1.25, 3 - 1; they sum to what is said last
    assert differences(said, torch.zeros(1)).tolist() == [[0.5, 0.75, -0.25, 2]]
    assert differences(said[:, 2:], said[:, 1]).tolist() == [[-0.25, 2]]


@pytest.mark.parametrize("model", MODELS)
def test_networks_are_those_written_out_by_hand(model: ModelName) -> None:
    inputs = np.random.default_rng(0).normal(size=(2, 7, 3)).astype(np.float32)
    tiny = network(model)
    rewards, _ = tiny(torch.from_numpy(inputs))
    for bag, found in zip(inputs, rewards.detach(), strict=True):
        # seven steps of float32 against float64
        assert found.tolist() == pytest.approx(by_hand(tiny, bag), abs=1e-6)


@pytest.mark.parametrize("model", MODELS)
def test_a_bag_in_pieces_is_the_bag(model: ModelName) -> None:
    tiny = network(model)
    inputs = torch.randn(4, 9, 3, generator=torch.Generator().manual_seed(0))
    whole, _ = tiny(inputs)
    first, state = tiny(inputs[:, :5])
    then, _ = tiny(inputs[:, 5:], state)
    torch.testing.assert_close(torch.cat([first, then], 1), whole)


@pytest.mark.parametrize("model", MODELS)
def test_errors_and_gradients_are_those_of_each_bag_alone(model: ModelName) -> None:
    # Bags of 1 to 6 steps share one padded batch; padding enters neither the sums nor what is learned from them.
    tiny, lengths = network(model), torch.tensor([3, 1, 6, 2])
    inputs = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([0.3, -1.0, 2.0, 0.5])
    bags, parameters = Bags(inputs, lengths, targets), list(tiny.parameters())

    def gradient(loss: Tensor) -> list[Tensor]:
        found = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
        return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]

    together = bags.errors(tiny, torch.tensor([2, 0, 3, 1]))
    alone = []
    for bag in (2, 0, 3, 1):
        start = int(lengths[:bag].sum())
        rewards, _ = tiny(inputs[None, start : start + int(lengths[bag])])
        alone.append(rewards.sum() - targets[bag])
    torch.testing.assert_close(together, torch.stack(alone))
    ours = gradient(together.square().sum())
    theirs = [sum(g) for g in zip(*(gradient(error.square()) for error in alone), strict=True)]
    for our, their in zip(ours, theirs, strict=True):
        assert isinstance(their, Tensor)
        torch.testing.assert_close(our, their)


@pytest.mark.parametrize("model", MODELS)
def test_labels_of_an_episode_sum_to_its_predicted_return(random_trajectories: Make, model: ModelName) -> None:
    data = random_trajectories((30, 1, 4, 150, 8))
    fitted = fit(data, np.array([9e4, -500, 7e3, 3e4, np.nan]), model=model)
    labels = fitted.label(data)
    assert labels.diagnostics is not None
    mean, std = fitted.predict(data)
    assert labels.diagnostics["predicted_return"].to_list() == pytest.approx(mean.tolist())
    assert labels.diagnostics["ensemble_std"].to_list() == pytest.approx(std.tolist())
    # float32 labels of some 1e4
    assert episode_returns(labels.rewards, data.offsets) == pytest.approx(mean, rel=1e-5, abs=1e-2)


def test_returns_of_thousands_in_bags_of_1_to_40_steps_come_back_in_their_own_units() -> None:
    """Features whose returns are sums of 2500 x - 730.5 y + 81.25 z over 1 to 40 steps, in 8 bags."""
    with np.load(FILES / "bags.npz") as file:
        features, lengths, returns = file["features"], file["lengths"], file["returns"]
    n_bags = len(lengths)
    assert episode_returns(features @ [2500, -730.5, 81.25], np.append(0, lengths.cumsum())) == pytest.approx(returns)
    rows = np.arange(len(features)) + np.repeat(np.arange(n_bags), lengths)
    observations = np.zeros((len(features) + n_bags, 3), np.float32)
    observations[rows] = features
    data = Trajectories(
        observations=observations,
        actions=np.zeros((len(features), 1), np.float32),
        offsets=np.append(0, lengths.cumsum()).astype(np.int64),
        terminated=np.zeros(n_bags, bool),
        truncated=np.ones(n_bags, bool),
        final_observed=np.zeros(n_bags, bool),
    )
    settings = {"model": "instance_space_nn", "next_observations": False, "members": 1, "steps": 700}
    fitted = fit(data, returns, **settings)
    labels = fitted.label(data)
    assert labels.diagnostics is not None
    predicted = labels.diagnostics["predicted_return"].to_numpy()
    # Seven of eight bags are trained on: within a tenth of the standard deviation, 4677, of the returns.
    assert np.sort(np.abs(predicted - returns))[-2] < 470
    found = correlation(labels.rewards, features @ [2500, -730.5, 81.25])
    assert found.pearson is not None and found.pearson > 0.8
    # In other units, and with another reward for being there, the labels follow.
    other = fit(data, 1e-3 * returns + 7 * lengths, **settings).label(data).rewards
    assert other == pytest.approx(1e-3 * labels.rewards.astype(np.float64) + 7, abs=0.02)
    one_by_one = [fitted.label(data.select([bag])).rewards for bag in range(n_bags)]
    assert np.concatenate(one_by_one).tobytes() == labels.rewards.tobytes()


@pytest.mark.parametrize("model", MODELS)
def test_any_sharding_and_order_of_episodes_gives_the_same_bits(random_trajectories: Make, model: ModelName) -> None:
    lengths = (30, 1, 2 * CHUNK + 5, 40, CHUNK, CHUNK + 1, *range(2, BAGS))
    data = random_trajectories(lengths)
    fitted = fit(data, np.arange(len(lengths)), model=model)
    whole = fitted.label(data).rewards
    steps = [np.arange(a, b) for a, b in zip(data.offsets[:-1], data.offsets[1:], strict=True)]
    for episodes in ([0], [1], [2], [5, 4, 2], np.random.default_rng(0).permutation(len(lengths)).tolist()):
        rows = np.concatenate([steps[e] for e in episodes])
        assert fitted.label(data.select(episodes)).rewards.tobytes() == whole[rows].tobytes()


def test_the_same_seed_gives_the_same_bits_and_leaves_other_random_numbers_alone(random_trajectories: Make) -> None:
    data = random_trajectories((5, 9, 3, 7))

    def labels(seed: int) -> list[float]:
        return fit(data, np.arange(4), seed=seed).label(data).rewards.tolist()

    torch.manual_seed(3)
    expected = torch.rand(3).tolist()
    first = labels(0)
    torch.manual_seed(3)
    assert labels(0) == first != labels(1)
    assert torch.rand(3).tolist() == expected


def test_members_of_an_ensemble_are_what_they_are_alone(random_trajectories: Make) -> None:
    data = random_trajectories((5, 9, 3, 7))
    one, two = (fit(data, np.arange(4), members=m) for m in (1, 2))
    inputs = torch.randn(2, 6, 9, generator=torch.Generator().manual_seed(0))
    said = [network(inputs)[0].tolist() for network in (one.networks[0], *two.networks)]
    assert said[0] == said[1] != said[2]


def test_episodes_without_a_known_return_are_not_learned_from(random_trajectories: Make) -> None:
    data = random_trajectories((5, 9, 3, 7))
    returns = np.array([1, np.nan, 5, 2])
    observations = data.observations.copy()
    observations[6:16] = 1e3
    before, after = (fit(d, returns) for d in (data, replace(data, observations=observations)))
    kept = data.select([0, 2, 3])
    assert before.label(kept).rewards.tobytes() == after.label(kept).rewards.tobytes()
    assert before.report == after.report
    assert before.report["known"] == 3


def test_reports_say_how_well_held_out_returns_were_met(random_trajectories: Make) -> None:
    data = random_trajectories((10,) * 40)
    report = fit(data, np.arange(40)).report
    judged = report["held_out"]
    assert isinstance(judged, dict) and judged["n"] == 4 and isinstance(report["best_step"], list)
    assert len(report["best_step"]) == 2


def test_unknown_next_observations_are_named(random_trajectories: Make) -> None:
    data = replace(random_trajectories((5, 9, 3)), final_observed=np.array([True, False, True]))
    diagnostics = fit(data, np.arange(3)).label(data).diagnostics
    assert diagnostics is not None and diagnostics["next_unknown"].to_list() == [False, True, False]
    alone = fit(data, np.arange(3), next_observations=False).label(data).diagnostics
    assert alone is not None and "next_unknown" not in alone.columns


def test_discrete_actions_are_learned_from(random_trajectories: Make) -> None:
    data = random_trajectories((8,) * 60, n_actions=(3,))
    rewards = (np.asarray(data.actions) == 1).astype(np.float32)
    fitted = fit(
        data, episode_returns(rewards, data.offsets), model="instance_space_nn", next_observations=False, steps=400
    )
    found = correlation(fitted.label(data).rewards, rewards)
    assert found.pearson is not None and found.pearson > 0.95


def test_one_known_return_is_refused(random_trajectories: Make) -> None:
    with pytest.raises(ConfigurationError, match=r"1 known return\(s\).*raise `fraction`"):
        fit(random_trajectories((5, 9)), np.array([1, np.nan]))


def test_equal_returns_and_returns_of_noise_are_warned_of(random_trajectories: Make) -> None:
    data = random_trajectories((5,) * 10)
    with pytest.warns(UserWarning, match="every known return is 7: they say nothing"):
        labels = fit(data, np.full(10, 7)).label(data)
    assert labels.diagnostics is not None
    assert labels.diagnostics["predicted_return"].to_list() == pytest.approx([7] * 10, abs=1)
    noise = np.random.default_rng(0).normal(size=10)
    with pytest.warns(UserWarning, match="nothing was learned. Give more returns"):
        fit(data, noise, steps=200)


@pytest.mark.parametrize("model", MODELS)
def test_saved_and_loaded_it_gives_the_same_bits(random_trajectories: Make, model: ModelName, tmp_path: Path) -> None:
    data = random_trajectories((5, 9, 3, 7))
    labeler = MultipleInstance(model=model, members=2, hidden=4, steps=20)
    fitted = labeler.fit(data, Evidence("x", returns=np.arange(4.0)), device=CPU)
    path = tmp_path / "fitted.safetensors"
    labeler.save(fitted, path)
    loaded = labeler.load(path, device=CPU)
    assert loaded.label(data).rewards.tobytes() == fitted.label(data).rewards.tobytes()
    assert loaded.report == fitted.report
    with pytest.raises(StoreError, match="load it with the configuration that it was fitted with"):
        labeler.model_copy(update={"hidden": 5}).load(path, device=CPU)


def test_a_reward_that_hangs_on_a_remembered_event_is_recovered_by_memory_alone() -> None:
    data, rewards = remembered(700, seed=0)
    new, new_rewards = remembered(200, seed=1)
    returns = episode_returns(rewards, data.offsets)
    found = {}
    for model, steps in (("csc_instance_space_lstm", 1200), ("instance_space_nn", 600)):
        fitted = fit(data, returns, model=model, next_observations=False, members=1, hidden=32, steps=steps)
        found[model] = correlation(fitted.label(new).rewards, new_rewards).pearson
    assert found["csc_instance_space_lstm"] is not None and found["csc_instance_space_lstm"] >= 0.9
    assert found["instance_space_nn"] is not None and found["instance_space_nn"] < 0.6
