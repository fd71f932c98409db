"""`optimal_transport`: worked values, agreement with POT, and what may not change a label."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import ot
import pytest
import torch
from pydantic import ValidationError

from data.errors import DatasetError, WorkError
from data.readers import recognise
from data.trajectories import Trajectories, concatenate
from labelers import optimal_transport
from labelers.evidence import Demonstrations, Evidence
from labelers.optimal_transport import OptimalTransport, Squashing

CPU = torch.device("cpu")
FILES = Path(__file__).parent / "files"
RAW: dict[str, object] = {"squashing": None}
"""The reward without squashing, -sum_j P_tj C_tj: it sums to minus the transport cost."""


def track(*points: np.ndarray) -> Trajectories:
    """Episodes through the given points [T, d]; what comes after the last one is not known."""
    lengths = [len(p) for p in points]
    observations = np.concatenate([np.concatenate([p, p[-1:]]) for p in points]).astype(np.float32)
    return Trajectories(
        observations=observations,
        actions=np.zeros((sum(lengths), 1), np.float32),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        terminated=np.zeros(len(points), bool),
        truncated=np.ones(len(points), bool),
        final_observed=np.zeros(len(points), bool),
    )


def label(data: Trajectories, demonstrations: Trajectories, **settings: object) -> np.ndarray:
    labeler = OptimalTransport.model_validate({"demonstrations": {"episodes": [0]}, **settings})
    fitted = labeler.fit(data, Evidence("x", demonstrations=demonstrations), device=CPU)
    return fitted.label(data).rewards


@pytest.fixture(scope="module")
def tracks() -> dict[str, np.ndarray]:
    with np.load(FILES / "tracks.npz") as file:
        return dict(file)


@pytest.fixture(scope="module")
def replay(hopper: Path) -> Trajectories:
    return _read(hopper / "hopper-replay.hdf5")


@pytest.fixture(scope="module")
def expert(hopper: Path) -> Trajectories:
    return _read(hopper / "hopper-expert.hdf5").select([0])


def _read(path: Path) -> Trajectories:
    with recognise(path).open(path) as source:
        return concatenate([block.trajectories for block in source.blocks()])


# ---------------------------------------------------------------- worked values

PAIR = track(np.array([[1.0, 0], [0, 1]]))
DIAGONAL = track(np.array([[1.0, 0], [1, 1]]))
"""Cosine costs 0 and .29289322 for the first step, 1 and .29289322 for the second."""


def test_rewards_are_the_worked_values() -> None:
    rewards = label(PAIR, DIAGONAL, epsilon=0.5)
    assert rewards == pytest.approx([4.10624955, 1.49448116], rel=1e-6)


def test_without_division_by_the_width_they_are_those_of_antmaze() -> None:
    squashing = {"alpha": 5.0, "beta": 1.0, "per_dimension": False}
    assert label(PAIR, DIAGONAL, epsilon=0.5, squashing=squashing) == pytest.approx([4.62125718, 3.08445317], rel=1e-6)


def test_converged_transport_moves_each_step_onto_its_own() -> None:
    # Towards epsilon 0 the plan is the identity: costs 0 and .29289322, rewards 5 and 5 exp(-5 * .29289322 / 2).
    rewards = label(PAIR, DIAGONAL, epsilon=0.01)
    assert rewards == pytest.approx([5, 5 * np.exp(-2.5 * 0.29289322)], rel=1e-5)


def test_the_papers_hundred_iterations_stop_short_of_it() -> None:
    assert label(PAIR, DIAGONAL, preset="paper") == pytest.approx([4.98181826, 2.40417030], rel=1e-6)


def test_paper_preset_is_the_official_iteration_with_weights_of_a_thousandth(tracks: dict[str, np.ndarray]) -> None:
    x, y = tracks["track_0"], tracks["expert_1"]
    xn, yn = np.linalg.norm(x, axis=1), np.linalg.norm(y, axis=1)
    cost = np.clip(1 - (x @ y.T) / (xn[:, None] * yn + 1e-8), 0, 2).astype(np.float64)
    f, weight, epsilon = np.zeros(len(x)), 1e-3, 0.01
    for _ in range(100):
        g = epsilon * (np.log(weight) - np.log(np.exp((f[:, None] - cost) / epsilon).sum(0)))
        f = epsilon * (np.log(weight) - np.log(np.exp((g - cost) / epsilon).sum(1)))
    plan = np.exp((f[:, None] + g - cost) / epsilon)
    expected = 5 * np.exp(-5 * 1000 / x.shape[1] * (plan * cost).sum(1))
    assert label(track(x), track(y), preset="paper") == pytest.approx(expected, rel=1e-4)


# ---------------------------------------------------------------- agreement with POT


def rewards_by_pot(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """[T] rewards with the default settings: the fp64 plan, converged."""
    x, y = x.astype(np.float64), y.astype(np.float64)
    norms = np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(y, axis=1)
    cost = np.clip(1 - x @ y.T / (norms + 1e-8), 0, 2)
    n, m = cost.shape
    uniform = np.full(n, 1 / n), np.full(m, 1 / m)
    plan, log = ot.sinkhorn(
        *uniform, cost, 0.01, method="sinkhorn_log", stopThr=1e-11, numItermax=100_000, log=True, warn=False
    )
    assert log["err"][-1] < 1e-10
    return 5 * np.exp(-5 / x.shape[1] * (plan * cost).sum(1) * n)


def test_real_episodes_equal_pots_converged_answer(replay: Trajectories, expert: Trajectories) -> None:
    lengths = replay.lengths
    by_length = np.argsort(lengths, kind="stable")
    shown = [int(by_length[0]), *(int(e) for e in by_length[[60, 150, 220]])]
    sample = replay.select(shown)
    demonstration = track(expert.step_observations[::4])
    rewards = label(sample, demonstration)
    for e in range(len(shown)):
        steps = slice(sample.offsets[e], sample.offsets[e + 1])
        expected = rewards_by_pot(sample.step_observations[steps], demonstration.step_observations)
        assert np.abs(rewards[steps] - expected).max() <= 1e-4 * np.abs(expected).max()


@pytest.mark.drill
def test_long_real_episodes_equal_pots_converged_answer(replay: Trajectories, expert: Trajectories) -> None:
    by_length = np.argsort(replay.lengths, kind="stable")
    sample = replay.select(by_length[[10, 200, 300]])
    rewards = label(sample, expert)
    for e in range(sample.n_episodes):
        steps = slice(sample.offsets[e], sample.offsets[e + 1])
        expected = rewards_by_pot(sample.step_observations[steps], expert.step_observations)
        assert np.abs(rewards[steps] - expected).max() <= 1e-4 * np.abs(expected).max()


def test_the_exact_solver_is_what_small_epsilon_tends_to(tracks: dict[str, np.ndarray]) -> None:
    data, demonstration = track(tracks["track_0"]), track(tracks["expert_0"])
    exact = label(data, demonstration, solver="exact", **RAW)
    near = label(data, demonstration, epsilon=1e-4, **RAW)
    assert near.sum() == pytest.approx(exact.sum(), rel=1e-3)


# ---------------------------------------------------------------- costs


@pytest.mark.parametrize(("epsilon", "cost"), [(1.0, 34.0393834), (0.1, 33.7849916), (0.01, 33.775936)])
def test_a_small_epsilon_keeps_the_plan_whole(epsilon: float, cost: float) -> None:
    with np.load(FILES / "clouds.npz") as clouds:
        data, demonstration = track(clouds["x"]), track(clouds["y"])
    rewards = label(data, demonstration, cost="squared_euclidean", epsilon=epsilon, **RAW)
    assert -rewards.sum(dtype=np.float64) == pytest.approx(cost, rel=1e-6)
    exact = label(data, demonstration, cost="squared_euclidean", solver="exact", **RAW)
    assert -exact.sum(dtype=np.float64) == pytest.approx(33.7758482, rel=1e-6)
    assert -rewards.sum(dtype=np.float64) >= 33.7758482 * (1 - 1e-6)


def test_a_zero_vector_costs_1_and_spoils_nothing_else() -> None:
    with np.load(FILES / "zero_vectors.npz") as file:
        rewards = label(track(file["x"]), track(file["y"]), epsilon=0.1, **RAW)
    expected = [-0.03250236, -0.16245001, -0.16666667, -0.09520236, -0.14788385, -0.16702218]
    assert rewards == pytest.approx(expected, rel=1e-5)


def test_euclidean_cost_is_the_distance() -> None:
    # One demonstration step: everything goes there, at its distance. 3-4-5 and 0.
    data, demonstration = track(np.array([[3.0, 4], [0, 0]])), track(np.array([[0.0, 0]]))
    assert label(data, demonstration, cost="euclidean", **RAW) == pytest.approx([-5 / 2, 0])
    assert label(data, demonstration, cost="squared_euclidean", **RAW) == pytest.approx([-25 / 2, 0])


# ---------------------------------------------------------------- several demonstrations


def test_totals_by_demonstration(tracks: dict[str, np.ndarray]) -> None:
    totals = {
        ("track_0", "expert_0"): -1.08819807,
        ("track_0", "expert_1"): -1.32118294,
        ("track_1", "expert_0"): -0.490717984,
        ("track_1", "expert_1"): -1.31025091,
        ("track_2", "expert_0"): -0.557095249,
        ("track_2", "expert_1"): -0.708655787,
        ("expert_0", "expert_0"): -0.0145481017,
    }
    for (name, expert), total in totals.items():
        rewards = label(track(tracks[name]), track(tracks[expert]), epsilon=0.05, **RAW)
        assert rewards.sum(dtype=np.float64) == pytest.approx(total, rel=1e-5)
    first = label(track(tracks["track_0"]), track(tracks["expert_0"]), epsilon=0.05, **RAW)[:3]
    assert first == pytest.approx([-0.0499625213, -0.046185699, -0.0711572837], rel=1e-5)


def test_an_episode_takes_the_demonstration_that_pays_it_best(tracks: dict[str, np.ndarray]) -> None:
    data = track(tracks["track_0"], tracks["track_1"], tracks["track_2"])
    near, far = tracks["expert_0"], tracks["expert_1"]
    labeler = OptimalTransport(demonstrations=Demonstrations(episodes=(0, 1)), epsilon=0.05)
    fitted = labeler.fit(data, Evidence("x", demonstrations=track(far, near)), device=CPU)
    labels = fitted.label(data)
    assert labels.diagnostics is not None
    assert labels.diagnostics["demonstration"].to_list() == [1, 1, 1]
    assert labels.rewards == pytest.approx(label(data, track(near), epsilon=0.05))


def test_demonstrations_solved_together_give_what_each_gives_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Demonstrations of different length and two that are equal, in one batch, in groups, and pair by pair.

    Of the equal two, rounding decides.
    """
    rng = np.random.default_rng(3)
    data = track(*(rng.normal(size=(n, 4)) for n in (5, 30, 12, 1, 18)))
    experts = [rng.normal(size=(n, 4)) + 0.3 * k for k, n in enumerate((10, 60, 11, 12))]
    experts.append(experts[0])
    alone = [label(data, track(expert), **RAW) for expert in experts]
    sums = np.array([np.add.reduceat(a.astype(np.float64), data.offsets[:-1]) for a in alone])
    nearest = sums.argmax(0)
    expected = np.concatenate([alone[k][a:b] for k, a, b in zip(nearest, data.offsets, data.offsets[1:], strict=False)])
    labeler = OptimalTransport.model_validate({"demonstrations": {"episodes": tuple(range(5))}, **RAW})
    fitted = labeler.fit(data, Evidence("x", demonstrations=track(*experts)), device=CPU)
    for entries in (1 << 20, 700, 1):
        monkeypatch.setitem(optimal_transport.BATCH_ENTRIES, "cpu", entries)
        done: list[int] = []
        labels = fitted.label(data, progress=done.append)
        assert labels.rewards == pytest.approx(expected, rel=1e-5)
        assert labels.diagnostics is not None
        assert (labels.diagnostics["demonstration"].to_numpy() % 4).tolist() == (nearest % 4).tolist()
        assert sum(done) == data.n_episodes


# ---------------------------------------------------------------- what may not change a label


def test_batches_order_and_shards_change_nothing(
    tracks: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["track_0", "track_1", "track_2", "expert_1"]
    data = track(*(tracks[n] for n in names))
    demonstration = track(tracks["expert_0"])
    together = label(data, demonstration, epsilon=0.05)
    alone = np.concatenate([label(data.select([e]), demonstration, epsilon=0.05) for e in range(4)])
    assert alone == pytest.approx(together, rel=1e-5)
    reordered = label(data.select([3, 1, 0, 2]), demonstration, epsilon=0.05)
    back = np.split(reordered, np.cumsum([9, 3, 12]))
    assert np.concatenate([back[2], back[1], back[3], back[0]]) == pytest.approx(together, rel=1e-5)
    monkeypatch.setitem(optimal_transport.BATCH_ENTRIES, "cpu", 1)
    assert label(data, demonstration, epsilon=0.05) == pytest.approx(together, rel=1e-5)


def test_the_same_input_gives_the_same_bits(tracks: dict[str, np.ndarray]) -> None:
    data, demonstration = track(tracks["track_0"], tracks["track_2"]), track(tracks["expert_0"])
    first, second = (label(data, demonstration) for _ in range(2))
    assert first.tobytes() == second.tobytes()


def test_one_step_pays_its_mean_cost() -> None:
    # A single row spreads over all columns: costs 0 and .29289322 by halves.
    rewards = label(track(np.array([[1.0, 0]])), DIAGONAL, **RAW)
    assert rewards == pytest.approx([-0.29289322 / 2], rel=1e-6)


@pytest.mark.parametrize(
    ("steps", "demonstration"), [(1, 300), (3000, 1), pytest.param(10_000, 1000, marks=pytest.mark.drill)]
)
def test_very_short_and_very_long_episodes_converge(steps: int, demonstration: int) -> None:
    rng = np.random.default_rng(0)

    def circling(n: int) -> np.ndarray:
        angle = np.cumsum(rng.uniform(0, 0.1, n))
        return np.stack([np.cos(angle), np.sin(angle), np.ones(n)], 1) + rng.normal(0, 0.1, (n, 3))

    data, expert = track(circling(steps)), track(circling(demonstration))
    total = -label(data, expert, **RAW).sum(dtype=np.float64)
    x, y = (t.step_observations.astype(np.float64) for t in (data, expert))
    cost = 1 - x @ y.T / (np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(y, axis=1))
    # No plan costs less than sending each step to its nearest, and none that entropy prefers more than all to all.
    assert cost.min(1).mean() * (1 - 1e-6) <= total <= cost.mean() * (1 + 1e-6)


# ---------------------------------------------------------------- what goes wrong


def test_an_episode_that_does_not_converge_is_an_error_by_name(tracks: dict[str, np.ndarray]) -> None:
    data, demonstration = track(tracks["track_2"], tracks["track_1"]), track(tracks["expert_1"])
    with pytest.raises(WorkError, match=r"episode 1 .* did not converge: marginal error .*`not_converged: warning`"):
        label(data, demonstration, epsilon=1e-5, max_iterations=1, tolerance=1e-300)


def test_or_is_labelled_by_the_exact_solver_with_a_warning(tracks: dict[str, np.ndarray]) -> None:
    data, demonstration = track(tracks["track_2"]), track(tracks["expert_1"])
    with pytest.warns(UserWarning, match="labelled by the exact solver"):
        stopped = label(data, demonstration, epsilon=1e-5, max_iterations=1, tolerance=1e-300, not_converged="warning")
    assert stopped == pytest.approx(label(data, demonstration, solver="exact"))


def test_demonstrations_of_another_width_are_refused(random_trajectories: Callable[..., Trajectories]) -> None:
    with pytest.raises(DatasetError, match="demonstrations have 4 numbers and those of the dataset 3"):
        label(random_trajectories(), random_trajectories(width=4))


@pytest.mark.parametrize("setting", [{"epsilon": 0.1}, {"cost": "euclidean"}, {"solver": "exact"}])
def test_the_papers_preset_leaves_no_choice(setting: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match="preset 'paper' fixes"):
        OptimalTransport.model_validate({"demonstrations": {"episodes": [0]}, "preset": "paper", **setting})


def test_squashing_defaults_are_the_papers() -> None:
    assert Squashing() == Squashing(alpha=5, beta=5, per_dimension=True)
