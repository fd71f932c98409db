"""What every registered algorithm must do, whatever it learns."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import polars as pl
import pytest
import torch

from algorithms import AnyAlgorithm
from algorithms.algorithm import Algorithm
from algorithms.policy import load_policy, save_policy
from algorithms.spec import Spec
from algorithms.training import Member, Trained, Training, train
from data.trajectories import Trajectories

Make = Callable[..., Trajectories]

CPU = torch.device("cpu")
KINDS: list[type[Algorithm[Any]]] = list(get_args(get_args(AnyAlgorithm)[0]))
ACTIONS = {"continuous": None, "discrete": (3,), "multi-discrete": (2, 3)}


class Stopped(Exception):  # noqa: N818
    pass


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
def algorithm(request: pytest.FixtureRequest) -> Algorithm[Any]:
    return request.param(hidden=(16, 16))


@pytest.fixture(params=ACTIONS.values(), ids=ACTIONS.keys())
def trajectories(request: pytest.FixtureRequest, make: Make) -> Trajectories:
    return make(n_actions=request.param)


def members(trajectories: Trajectories, *runs: tuple[int, int]) -> list[Member]:
    """Members from (seed, label set) each."""
    return [
        Member(
            run_id=f"seed {seed}, labels {labels}",
            rewards=np.random.default_rng(labels).normal(size=trajectories.n_steps).astype(np.float32),
            seed=seed,
        )
        for seed, labels in runs
    ]


def losses(trained: Trained, member: int) -> np.ndarray:
    return trained.metrics.filter(pl.col("member") == member).sort("name", "step")["value"].to_numpy()


def actions(trained: Trained, trajectories: Trajectories) -> np.ndarray:
    observations = torch.from_numpy(np.asarray(trajectories.observations))
    return trained.policy.act(observations.expand(trained.policy.n_members, *observations.shape)).numpy()


def test_each_member_of_a_population_learns_as_if_alone(algorithm: Algorithm[Any], trajectories: Trajectories) -> None:
    training = Training(steps=12, batch_size=8, log_every=1)
    runs = members(trajectories, (0, 0), (1, 0), (0, 1))
    together = train(algorithm, trajectories, runs, training, device=CPU)
    assert together.policy.n_members == 3
    for p, run in enumerate(runs):
        alone = train(algorithm, trajectories, [run], training, device=CPU)
        # float32 sums in another order, through twelve steps of Adam
        np.testing.assert_allclose(losses(together, p), losses(alone, 0), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(actions(together, trajectories)[p], actions(alone, trajectories)[0], atol=1e-4)


def test_a_fresh_state_depends_on_the_seed_alone(algorithm: Algorithm[Any], trajectories: Trajectories) -> None:
    spec = Spec.of(trajectories)
    alone, among = (algorithm.init(spec, seeds, 10, CPU).state_dict() for seeds in ([5], [2, 5]))
    for name, tensor in alone.items():
        if tensor.ndim:
            each = len(tensor)
            assert torch.equal(tensor, among[name][each:]), name


def test_the_same_training_gives_the_same_bits(algorithm: Algorithm[Any], trajectories: Trajectories) -> None:
    runs, training = members(trajectories, (0, 0), (1, 1)), Training(steps=5, log_every=1)
    one, other = (train(algorithm, trajectories, runs, training, device=CPU) for _ in range(2))
    assert one.metrics.equals(other.metrics)


def test_training_resumes_bit_for_bit(algorithm: Algorithm[Any], trajectories: Trajectories, tmp_path: Path) -> None:
    # The kill falls between checkpoints, and the checkpoint between rows of the log.
    training = Training(steps=200, batch_size=8, log_every=30, checkpoint_every=100)
    runs = members(trajectories, (0, 0), (1, 1))
    straight = train(algorithm, trajectories, runs, training, device=CPU, checkpoint=tmp_path / "straight")
    done: list[int] = []

    def interrupt(steps: int) -> None:
        done.append(steps)
        if sum(done) == 130:
            raise Stopped

    killed = tmp_path / "killed"
    with pytest.raises(Stopped):
        train(algorithm, trajectories, runs, training, device=CPU, checkpoint=killed, progress=interrupt)
    resumed_steps: list[int] = []
    resumed = train(
        algorithm, trajectories, runs, training, device=CPU, checkpoint=killed, progress=resumed_steps.append
    )
    assert resumed_steps[0] == 100 and sum(resumed_steps) == 200
    assert resumed.metrics.equals(straight.metrics)
    assert (tmp_path / "straight").read_bytes() == killed.read_bytes()


def test_a_saved_policy_acts_the_same_without_its_dataset(
    algorithm: Algorithm[Any], trajectories: Trajectories, tmp_path: Path
) -> None:
    training = Training(steps=3, batch_size=8)
    trained = train(algorithm, trajectories, members(trajectories, (0, 0), (1, 1)), training, device=CPU)
    for p in range(2):
        save_policy(trained.policy, p, tmp_path / "policy.safetensors")
        loaded = load_policy(tmp_path / "policy.safetensors")
        assert loaded.n_members == 1
        assert loaded.algorithm == algorithm.model_dump(mode="json")
        found = loaded.act(torch.from_numpy(np.asarray(trajectories.observations))[None]).numpy()[0]
        # another number of networks in one product may round another way
        np.testing.assert_allclose(found, actions(trained, trajectories)[p], atol=1e-6)
        assert found.shape[1:] == trajectories.actions.shape[1:]


def test_everything_is_finite_on_tiny_data(algorithm: Algorithm[Any], make: Make) -> None:
    for n_actions in ACTIONS.values():
        for lengths in ((1,), (1, 1), (2,)):
            tiny = make(lengths=lengths, n_actions=n_actions)
            trained = train(algorithm, tiny, members(tiny, (0, 0)), Training(steps=20, log_every=1), device=CPU)
            assert np.isfinite(trained.metrics["value"].to_numpy()).all()
            assert np.isfinite(actions(trained, tiny)).all()


def test_constant_observations_and_actions_stay_finite(algorithm: Algorithm[Any], make: Make) -> None:
    data = make()
    still = Trajectories(
        observations=np.full_like(data.observations, 1e9),
        actions=np.full_like(data.actions, 0.25),
        offsets=data.offsets,
        terminated=data.terminated,
        truncated=data.truncated,
        final_observed=data.final_observed,
    )
    trained = train(algorithm, still, members(still, (0, 0)), Training(steps=20, log_every=1), device=CPU)
    assert np.isfinite(trained.metrics["value"].to_numpy()).all()
    assert (actions(trained, still) == 0.25).all()
