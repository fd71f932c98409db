"""What a policy is worth: roll-outs in an environment, and scores relative to D4RL's reference returns."""

from __future__ import annotations

import csv
import difflib
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from pydantic import Field

from algorithms.policy import Policy
from data.config import Config
from data.errors import ConfigurationError
from data.progress import Progress, silent

if TYPE_CHECKING:
    import gymnasium

Environment: TypeAlias = "gymnasium.Env[Any, Any]"


class Evaluation(Config):
    """How policies are rolled out.

    episodes: a member. every: steps of training between evaluations, None for one at the end. seed: of the
    environments' first states, the same for all members.
    """

    episodes: int = Field(default=10, gt=0)
    every: int | None = Field(default=None, gt=0)
    seed: int = Field(default=0, ge=0)


def evaluate(policy: Policy, environment: str, episodes: int, seed: int, progress: Progress = silent) -> np.ndarray:
    """[P, episodes] float64, the undiscounted return of each episode of each of P members.

    All episodes of all members run side by side, with one call of the policy a time step. Episode k starts from the
    same state for every member. The same policies and seed give the same returns.
    progress: called with episodes just done.
    Raises ConfigurationError if the environment does not exist, has no limit of steps, or does not fit the policy.
    """
    n_members, spec = policy.n_members, policy.spec
    expected = (spec.observation_shape, spec.action_shape, spec.n_actions)
    if spaces_of(environment) != expected:
        raise ConfigurationError(
            f"environment {environment} has (observation, action, n_actions) {spaces_of(environment)}, and the policy "
            f"was trained for {expected}."
        )
    starts = [int(np.random.SeedSequence([seed, k]).generate_state(1)[0]) for k in range(episodes)]
    running = {(p, k): _make(environment) for p in range(n_members) for k in range(episodes)}
    observations = np.zeros((n_members, episodes, *spec.observation_shape))
    returns = np.zeros((n_members, episodes))
    for (p, k), env in running.items():
        observations[p, k], _ = env.reset(seed=starts[k])
    dtype = next(iter(running.values())).action_space.dtype
    while running:
        actions = policy.act(torch.from_numpy(observations)).cpu().numpy().astype(dtype)
        finished = []
        for place, env in running.items():
            observations[place], reward, terminated, truncated, _ = env.step(actions[place])
            returns[place] += float(reward)
            if terminated or truncated:
                finished.append(place)
        for place in finished:
            running.pop(place).close()
            progress(1)
    return returns


def spaces_of(environment: str) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...] | None]:
    """Shapes of an observation and of an action, and the numbers of choices if actions are discrete.

    Raises ConfigurationError if the environment does not exist, cannot be made, or has spaces of another kind.
    """
    from gymnasium.spaces import Box, Discrete, MultiDiscrete

    env = _make(environment)
    env.close()
    limited = env.spec is not None and env.spec.max_episode_steps is not None
    observation, action = env.observation_space, env.action_space
    if not limited:
        raise ConfigurationError(
            f"environment {environment} has no limit of steps (max_episode_steps), so an episode might never end: "
            "register it with one."
        )
    if not isinstance(observation, Box):
        raise ConfigurationError(
            f"environment {environment} has observations {observation}: policies read arrays (Box); register it with "
            "gymnasium's FlattenObservation."
        )
    if isinstance(action, Box):
        return observation.shape, action.shape, None
    if isinstance(action, Discrete) and action.start == 0:
        return observation.shape, (), (int(action.n),)
    if isinstance(action, MultiDiscrete) and action.nvec.ndim == 1 and not action.start.any():
        return observation.shape, action.shape, tuple(int(n) for n in action.nvec)
    raise ConfigurationError(
        f"environment {environment} has actions {action}: expected Box, Discrete or MultiDiscrete."
    )


def _make(environment: str) -> Environment:
    import gymnasium

    try:
        return gymnasium.make(environment, disable_env_checker=True)
    except gymnasium.error.DependencyNotInstalled as error:
        raise ConfigurationError(
            f"environment {environment} needs more packages ({error}): install assay[envs]."
        ) from error
    except (gymnasium.error.Error, ModuleNotFoundError) as error:
        raise ConfigurationError(f"environment '{environment}' cannot be made: {error}") from error


def normalised_score(returns: np.ndarray, reference: str) -> np.ndarray:
    """100 (return - random) / (expert - random), any shape: 0 is a random policy, 100 D4RL's expert.

    reference: a name in `reference_scores.csv`, such as hopper-medium-v2. Raises ConfigurationError for other names.
    """
    random, expert = reference_score(reference)
    scores: np.ndarray = 100 * (np.asarray(returns, np.float64) - random) / (expert - random)
    return scores


def reference_score(reference: str) -> tuple[float, float]:
    """Returns of a random and of an expert policy. Raises ConfigurationError for an unknown name, with the nearest."""
    scores = _reference_scores()
    if reference not in scores:
        near = difflib.get_close_matches(reference, scores, n=3)
        advice = f"did you mean {' or '.join(near)}?" if near else "expected one like hopper-medium-v2."
        raise ConfigurationError(f"no reference score is called '{reference}': {advice}")
    return scores[reference]


@cache
def _reference_scores() -> dict[str, tuple[float, float]]:
    with (files("algorithms") / "reference_scores.csv").open(encoding="utf-8") as file:
        return {
            row["dataset"]: (float(row["random_score"]), float(row["expert_score"])) for row in csv.DictReader(file)
        }


def resolve_device(setting: str) -> torch.device:
    """The device that `setting` names: auto (CUDA if there is any), cpu, cuda, or cuda:1.

    Raises ConfigurationError for other names, and for a device that is not there.
    """
    if setting == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, index = setting.partition(":")
    if setting != "cpu" and not (kind == "cuda" and (index.isdigit() or setting == "cuda")):
        raise ConfigurationError(f"device '{setting}' is unknown: expected auto, cpu, cuda or cuda:0, cuda:1, ...")
    n_devices = torch.cuda.device_count()
    if kind == "cuda" and int(index or 0) >= n_devices:
        raise ConfigurationError(f"device '{setting}' is not there: {n_devices} CUDA devices found. Use auto or cpu.")
    return torch.device(setting)
