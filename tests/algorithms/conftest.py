from collections.abc import Callable

import numpy as np
import pytest

from data.trajectories import Trajectories

Make = Callable[..., Trajectories]


@pytest.fixture
def make() -> Make:
    """Makes small random trajectories; the first episode terminates, the second is truncated, and so on."""

    def trajectories(
        lengths: tuple[int, ...] = (5, 7, 4, 9),
        n_actions: tuple[int, ...] | None = None,
        final_observed: bool = True,
        seed: int = 0,
    ) -> Trajectories:
        rng = np.random.default_rng(seed)
        n_steps, n_episodes = sum(lengths), len(lengths)
        if n_actions is None:
            actions = rng.uniform(-1, 1, (n_steps, 2)).astype(np.float32)
        else:
            actions = np.stack([rng.integers(0, n, n_steps) for n in n_actions], axis=1)
            actions = actions[:, 0] if len(n_actions) == 1 else actions
        terminated = np.arange(n_episodes) % 2 == 0
        return Trajectories(
            observations=rng.normal(2, 3, (n_steps + n_episodes, 3)).astype(np.float32),
            actions=actions,
            offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            terminated=terminated,
            truncated=~terminated,
            final_observed=np.full(n_episodes, final_observed),
            n_actions=n_actions,
            action_bounds=(-1.0, 1.0) if n_actions is None else None,
        )

    return trajectories
