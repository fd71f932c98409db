"""Sequences of episodes such as a store may hold, with the ends that formats find hard to say."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from data.trajectories import Trajectories

ENDS = ("own", "start of the next", "zeros", "the step's own", "not recorded")
"""What the observation after an episode's last step is."""


@st.composite
def stored_episodes(draw: st.DrawFn) -> Trajectories:
    """Any sequence of episodes of float32 vectors or whole-number images, continuous or discrete actions."""
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=6))
    shape, dtype = draw(st.sampled_from([((1,), "f4"), ((3,), "f4"), ((3,), "i8"), ((2, 2, 3), "u1"), ((2, 3), "f4")]))
    n_actions = draw(st.sampled_from([None, (4,), (2, 3)]))
    ends = draw(st.lists(st.sampled_from(ENDS), min_size=len(lengths), max_size=len(lengths)))
    kinds = draw(st.lists(st.sampled_from([(0, 1), (1, 0), (1, 1)]), min_size=len(lengths), max_size=len(lengths)))
    moving = draw(st.booleans())
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    n, e = sum(lengths), len(lengths)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    rows = (rng.normal(size=(n + e, *shape)) * (100 if moving else 0)).astype(dtype)
    for episode, end in enumerate(ends):
        final = offsets[episode + 1] + episode
        if end == "start of the next" and final + 1 < len(rows):
            rows[final] = rows[final + 1]
        elif end == "zeros":
            rows[final] = 0
        elif end in ("the step's own", "not recorded"):
            rows[final] = rows[final - 1]
    if n_actions is None:
        actions = rng.uniform(-1, 1, (n, draw(st.sampled_from([1, 2])))).astype(np.float32)
    else:
        actions = np.stack([rng.integers(0, count - 1, n) for count in n_actions], 1)
        actions = actions[:, 0] if len(n_actions) == 1 else actions
    return Trajectories(
        observations=rows,
        actions=actions,
        offsets=offsets,
        terminated=np.array([bool(t) for t, _ in kinds]),
        truncated=np.array([bool(t) for _, t in kinds]),
        final_observed=np.array([end != "not recorded" for end in ends]),
        n_actions=n_actions,
        action_bounds=draw(st.sampled_from([None, (-1.0, 1.0), (-1.1, 2.0)])) if n_actions is None else None,
    )


def rewards_of(trajectories: Trajectories, seed: int = 0) -> np.ndarray:
    """[N] float32 of all sizes, also subnormal and negative zero."""
    rng = np.random.default_rng(seed)
    rewards = (rng.normal(size=trajectories.n_steps) * 10.0 ** rng.integers(-44, 30, trajectories.n_steps)).astype("f4")
    rewards[:1] = -0.0
    return rewards
