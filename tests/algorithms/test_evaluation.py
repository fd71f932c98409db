from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete

from algorithms.evaluation import evaluate, normalised_score, reference_score, resolve_device, spaces_of
from algorithms.policy import Policy
from algorithms.spec import Spec
from data.errors import ConfigurationError
from labelers.networks import Networks, generator


class Countdown(gymnasium.Env[np.ndarray, Any]):
    """Starts at a number of 3 to 7 and counts down to 0; the reward is the number times the action."""

    def __init__(self, action: gymnasium.Space[Any], observation: gymnasium.Space[Any] | None = None) -> None:
        self.action_space = action
        self.observation_space = observation or Box(-np.inf, np.inf, (1,))

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._left = int(self.np_random.integers(3, 8))
        return np.array([self._left], np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), action
        reward = self._left * float(np.sum(action))
        self._left -= 1
        return np.array([self._left], np.float32), reward, self._left == 0, False, {}


SPACES = {
    "Continuous": Box(-1, 1, (2,)),
    "Discrete": Discrete(3),
    "MultiDiscrete": MultiDiscrete([2, 3]),
    "Started": Discrete(3, start=1),
}


@pytest.fixture(autouse=True)
def _environments() -> Iterator[None]:
    for name, space in SPACES.items():
        gymnasium.register(f"{name}Countdown-v0", Countdown, max_episode_steps=50, kwargs={"action": space})
    gymnasium.register("ShortCountdown-v0", Countdown, max_episode_steps=2, kwargs={"action": Box(-1, 1, (2,))})
    gymnasium.register("EndlessCountdown-v0", Countdown, kwargs={"action": Discrete(2)})
    named = {"action": Discrete(2), "observation": Dict({"x": Box(0, 1)})}
    gymnasium.register("NamedCountdown-v0", Countdown, max_episode_steps=9, kwargs=named)
    yield
    for name in [name for name in gymnasium.registry if "Countdown" in name]:
        del gymnasium.registry[name]


def constant(outputs: list[list[float]], n_actions: tuple[int, ...] | None, shape: tuple[int, ...]) -> Policy:
    """Policies whose networks give `outputs` [P, A] for every observation."""
    networks = Networks((1, len(outputs[0])), [generator(p, "initialisation") for p in range(len(outputs))])
    networks.weights[0].data.zero_()
    networks.biases[0].data[:] = torch.tensor(outputs).unsqueeze(1)
    bound = np.ones(len(outputs[0]) if n_actions is None else 0, np.float32)
    return Policy(Spec((1,), shape, n_actions, np.zeros(1), np.ones(1), -bound, bound), networks, {})


def test_returns_are_those_of_each_members_actions_from_the_same_starts() -> None:
    # tanh(+-100) = +-1 in both dimensions: from n, +-2 (n + n - 1 + ... + 1) = +-n (n + 1).
    policy = constant([[100.0, 100.0], [-100.0, -100.0], [100.0, -100.0]], None, (2,))
    done: list[int] = []
    returns = evaluate(policy, "ContinuousCountdown-v0", 20, 0, done.append)
    assert returns.shape == (3, 20) and returns.dtype == np.float64
    assert sum(done) == 60
    assert set(returns[0]) == {n * (n + 1) for n in range(3, 8)}
    np.testing.assert_array_equal(returns[1], -returns[0])
    assert not returns[2].any()


def test_the_seed_decides_the_episodes() -> None:
    policy = constant([[100.0, 100.0]], None, (2,))
    first, again, other = (evaluate(policy, "ContinuousCountdown-v0", 20, seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    np.testing.assert_array_equal(evaluate(policy, "ContinuousCountdown-v0", 5, 0), first[:, :5])


def test_an_episode_ends_when_it_is_truncated() -> None:
    returns = evaluate(constant([[100.0, 100.0]], None, (2,)), "ShortCountdown-v0", 20, 0)
    assert set(returns[0]) == {2 * (n + n - 1) for n in range(3, 8)}


def test_discrete_actions_are_the_best_choices() -> None:
    returns = evaluate(constant([[0.0, 0.0, 1.0], [0.0, 1.0, 0.0]], (3,), ()), "DiscreteCountdown-v0", 5, 0)
    np.testing.assert_array_equal(returns[0], 2 * returns[1])
    both = evaluate(constant([[0.0, 1.0, 0.0, 0.0, 1.0]], (2, 3), (2,)), "MultiDiscreteCountdown-v0", 5, 0)
    np.testing.assert_array_equal(both[0], 3 * returns[1])


def test_a_real_environment_is_rolled_out_to_the_same_returns_each_time() -> None:
    networks = Networks((3, 8, 1), [generator(p, "initialisation") for p in range(2)])
    spec = Spec((3,), (1,), None, np.zeros(3), np.ones(3), np.full(1, -2, np.float32), np.full(1, 2, np.float32))
    one, other = (evaluate(Policy(spec, networks, {}), "Pendulum-v1", 2, 3) for _ in range(2))
    np.testing.assert_array_equal(one, other)
    assert (one < -100).all()  # 200 steps of a pendulum that nobody holds up


def test_spaces_are_described_as_datasets_are() -> None:
    assert spaces_of("ContinuousCountdown-v0") == ((1,), (2,), None)
    assert spaces_of("DiscreteCountdown-v0") == ((1,), (), (3,))
    assert spaces_of("MultiDiscreteCountdown-v0") == ((1,), (2,), (2, 3))


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ("NoSuchThing-v0", "'NoSuchThing-v0' cannot be made"),
        ("StartedCountdown-v0", "has actions"),
        ("NamedCountdown-v0", "FlattenObservation"),
        ("EndlessCountdown-v0", "no limit of steps"),
    ],
)
def test_environments_that_do_not_fit_are_refused(environment: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        spaces_of(environment)


def test_a_policy_for_other_spaces_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"DiscreteCountdown-v0 has .* trained for"):
        evaluate(constant([[0.0, 0.0]], None, (2,)), "DiscreteCountdown-v0", 1, 0)


def test_scores_run_from_a_random_policy_to_the_expert() -> None:
    random, expert = -20.272305, 3234.3
    returns = np.array([[random, expert], [(random + expert) / 2, 0.0]])
    # 100 * 20.272305 / 3254.572305 = 0.622887
    np.testing.assert_allclose(normalised_score(returns, "hopper-medium-v2"), [[0, 100], [50, 0.622887]], atol=1e-6)
    assert reference_score("hopper-medium-replay-v2") == (random, expert)
    assert reference_score("halfcheetah-medium-v2") == (-280.178953, 12135.0)


def test_an_unknown_reference_names_the_nearest() -> None:
    with pytest.raises(ConfigurationError, match="'hoper-medium-v2': did you mean hopper-medium-v2"):
        normalised_score(np.zeros(1), "hoper-medium-v2")
    with pytest.raises(ConfigurationError, match="expected one like"):
        reference_score("xyz")


def test_devices_are_resolved_or_refused() -> None:
    assert resolve_device("cpu").type == "cpu"
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    for setting in ("cuda:99", *([] if torch.cuda.is_available() else ["cuda"])):
        with pytest.raises(ConfigurationError, match="is not there"):
            resolve_device(setting)
    for setting in ("gpu", "cuda:x", "cpu:1", ""):
        with pytest.raises(ConfigurationError, match="unknown"):
            resolve_device(setting)
