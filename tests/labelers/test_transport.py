"""The entropic solver against POT, which solves the same problems one by one, in float64, in the log domain."""

from __future__ import annotations

import numpy as np
import ot
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from labelers.transport import log_domain_sinkhorn, solve


def row_costs_by_pot(costs: np.ndarray, epsilon: float) -> np.ndarray:
    """[n] mean cost that each row pays under the plan that POT finds."""
    n, m = costs.shape
    plan, log = ot.sinkhorn(
        np.full(n, 1 / n),
        np.full(m, 1 / m),
        costs,
        epsilon,
        method="sinkhorn_log",
        stopThr=1e-13,
        numItermax=200_000,
        log=True,
        warn=False,
    )
    assert log["err"][-1] < 1e-12
    return (plan * costs).sum(1) * n


def random_costs(seed: int, lengths: list[int], n_columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Costs [B, longest, m] between noise, with rubbish on the padding, and the lengths."""
    rng = np.random.default_rng(seed)
    y = rng.normal(size=(n_columns, 3))
    costs = torch.full((len(lengths), max(lengths), n_columns), 123.0, dtype=torch.float64)
    for place, n in enumerate(lengths):
        x = rng.normal(size=(n, 3)) * rng.uniform(0.1, 2)
        costs[place, :n] = torch.from_numpy(((x[:, None] - y) ** 2).sum(2))
    return costs, torch.tensor(lengths)


def every_column(costs: torch.Tensor) -> torch.Tensor:
    return torch.full((len(costs),), costs.shape[2])


@pytest.mark.parametrize("epsilon", [0.5, 0.1, 0.05])
def test_a_ragged_batch_equals_pot_problem_by_problem(epsilon: float) -> None:
    lengths, widths = [1, 2, 7, 20, 33, 12, 9], [20, 1, 20, 20, 20, 15, 3]
    costs, n_rows = random_costs(0, lengths, n_columns=20)
    costs /= 10
    for place, m in enumerate(widths):
        costs[place, :, m:] = -7.0
    solution = solve(costs, n_rows, torch.tensor(widths), epsilon, tolerance=1e-9, max_iterations=20_000)
    assert solution.converged.all()
    for place, (n, m) in enumerate(zip(lengths, widths, strict=True)):
        expected = row_costs_by_pot(costs[place, :n, :m].numpy(), epsilon)
        assert solution.row_costs[place, :n].numpy() == pytest.approx(expected, rel=1e-7, abs=1e-9)
        assert (solution.row_costs[place, n:] == 0).all()


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    n_columns=st.integers(1, 12),
    epsilon=st.sampled_from([0.05, 0.5, 5.0]),
)
def test_any_small_problem_converges_to_pots_answer(
    seed: int, lengths: list[int], n_columns: int, epsilon: float
) -> None:
    costs, n_rows = random_costs(seed, lengths, n_columns)
    solution = solve(costs, n_rows, every_column(costs), epsilon, tolerance=1e-8, max_iterations=20_000)
    assert solution.converged.all()
    assert (solution.marginal_errors < 1e-6).all()
    for place, n in enumerate(lengths):
        # POT's loop is slow on some of these, so the check is one that always holds.
        cost = costs[place, :n].numpy()
        exact = ot.emd2(np.full(n, 1 / n), np.full(n_columns, 1 / n_columns), cost)
        total = float(solution.row_costs[place].sum()) / n
        assert exact * (1 - 1e-6) - 1e-9 <= total <= cost.mean() * (1 + 1e-6)


def test_neighbours_in_the_batch_change_nothing() -> None:
    costs, n_rows = random_costs(1, [9, 30, 4], n_columns=15)
    together = solve(costs, n_rows, every_column(costs), 0.1, tolerance=1e-9, max_iterations=20_000)
    for place, n in enumerate(n_rows.tolist()):
        alone = solve(
            costs[[place], :n],
            n_rows[[place]],
            every_column(costs)[[place]],
            0.1,
            tolerance=1e-9,
            max_iterations=20_000,
        )
        assert alone.row_costs[0].numpy() == pytest.approx(together.row_costs[place, :n].numpy(), rel=1e-8)


def test_a_tiny_epsilon_neither_underflows_nor_beats_the_exact_cost() -> None:
    rng = np.random.default_rng(2)
    cost = ((rng.normal(size=(12, 1, 6)) - rng.normal(size=(9, 6))) ** 2).sum(2) * 5
    exact = ot.emd2(np.full(12, 1 / 12), np.full(9, 1 / 9), cost)
    costs, n_rows = torch.from_numpy(cost)[None], torch.tensor([12])
    for epsilon in (1.0, 0.1, 0.01, 0.001):
        solution = solve(costs, n_rows, every_column(costs), epsilon, tolerance=1e-6, max_iterations=50_000)
        total = float(solution.row_costs.sum()) / 12
        assert total >= exact * (1 - 1e-9)
        assert solution.converged.all()
    assert total == pytest.approx(exact, rel=1e-4)


def test_equal_costs_are_solved_at_once() -> None:
    costs = torch.full((2, 5, 7), 3.0, dtype=torch.float64)
    solution = solve(costs, torch.tensor([5, 2]), every_column(costs), 0.01, tolerance=1e-9, max_iterations=1000)
    assert solution.converged.all()
    assert solution.row_costs[0].tolist() == pytest.approx([3.0] * 5)
    assert solution.row_costs[1].tolist() == pytest.approx([3.0, 3.0, 0, 0, 0])


def test_what_is_not_done_in_time_is_not_called_converged() -> None:
    costs, n_rows = random_costs(3, [40, 12], n_columns=40)
    solution = solve(
        costs, n_rows, every_column(costs), 0.01, tolerance=0.0, max_iterations=1
    )  # no change is less than none
    assert solution.converged.tolist() == [False, False]


def test_the_plain_loop_repeats_sinkhorn_as_written() -> None:
    """Against the same iteration written down once more, for one problem, in numpy."""
    costs, n_rows = random_costs(4, [6, 3], n_columns=5)
    n_columns = torch.tensor([4, 5])
    epsilon = 0.2
    for iterations in (1, 3, 10):
        solution = log_domain_sinkhorn(costs, n_rows, n_columns, epsilon, iterations, check_every=10, threshold=1e-9)
        assert solution.iterations.tolist() == [iterations, iterations]
        for place, (n, m) in enumerate(zip(n_rows.tolist(), n_columns.tolist(), strict=True)):
            cost = costs[place, :n, :m].numpy()
            kernel = np.exp(-cost / epsilon)
            u, v = np.ones(n), np.ones(m)
            for _ in range(iterations):
                v = (1 / m) / (kernel.T @ u)
                u = (1 / n) / (kernel @ v)
            plan = u[:, None] * kernel * v
            assert solution.row_costs[place, :n].numpy() == pytest.approx((plan * cost).sum(1) * n, rel=1e-10)
            assert float(solution.marginal_errors[place]) == pytest.approx(np.abs(plan.sum(0) - 1 / m).sum(), rel=1e-6)


def test_the_plain_loop_stops_where_its_threshold_says() -> None:
    costs, n_rows = random_costs(5, [6, 4], n_columns=5)
    solution = log_domain_sinkhorn(costs, n_rows, every_column(costs), 50.0, 100, check_every=10, threshold=1e-9)
    assert solution.converged.all()
    assert solution.iterations.tolist() == [10, 10]


@pytest.mark.parametrize("gap", [1.0, 3.0, 10.0, 30.0])
def test_parts_that_hardly_touch_are_balanced_all_the_same(gap: float) -> None:
    """Two far clusters with a little more mass on one side: potentials must move far before the error falls."""
    rng = np.random.default_rng(6)

    def clusters(*sizes: int) -> np.ndarray:
        return np.concatenate([gap * place + 0.05 * rng.normal(size=(n, 2)) for place, n in enumerate(sizes)])

    x, y = clusters(50, 47), clusters(50, 50)
    cost = ((x[:, None] - y) ** 2).sum(2)
    costs, n_rows = torch.from_numpy(cost)[None], torch.tensor([97])
    solution = solve(costs, n_rows, every_column(costs), 0.01, tolerance=1e-8, max_iterations=2000)
    assert solution.converged.all()
    assert solution.marginal_errors[0] < 1e-9
    exact = ot.emd2(np.full(97, 1 / 97), np.full(100, 1 / 100), cost)
    assert exact <= float(solution.row_costs.sum()) / 97 <= exact + 0.01 * np.log(97 * 100)


KINDS = ("noise", "walk", "clusters", "copies")


def clouds(rng: np.random.Generator, kind: str, count: int, n: int, width: int) -> torch.Tensor:
    """Points [count, n, width] of some kind."""
    points = rng.normal(size=(count, n, width))
    if kind == "walk":
        points = 0.1 * points.cumsum(1)
    if kind == "clusters":
        points = 0.03 * points + rng.integers(0, 4, size=(count, n, 1)) * rng.choice([0.5, 2.0])
    if kind == "copies":
        points = points[:, rng.integers(0, max(1, n // 3), size=n)]
    return torch.from_numpy(points)


def check_random_batches(seed: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(count):
        kind, epsilon = rng.choice(KINDS), float(rng.choice([1.0, 0.1, 0.03, 0.01, 0.003]))
        batch, n, m, width = (
            int(rng.choice(c)) for c in ([1, 3, 5], [1, 3, 20, 100, 300], [1, 2, 17, 90, 250], [1, 5, 20])
        )
        costs = torch.cdist(clouds(rng, kind, batch, n, width), clouds(rng, kind, batch, m, width))
        if rng.random() < 0.4:
            costs = costs**2
        n_rows, n_columns = (torch.from_numpy(rng.integers(1, k + 1, size=batch)) for k in (n, m))
        solution = solve(costs, n_rows, n_columns, epsilon, tolerance=1e-6, max_iterations=1000)
        assert solution.converged.all(), (seed, kind, epsilon, n_rows, n_columns, solution.iterations)
        for place, (rows, columns) in enumerate(zip(n_rows.tolist(), n_columns.tolist(), strict=True)):
            cost = costs[place, :rows, :columns].numpy()
            exact = ot.emd2(np.full(rows, 1 / rows), np.full(columns, 1 / columns), cost)
            total = float(solution.row_costs[place].sum()) / rows
            bound = exact + epsilon * np.log(rows * columns)
            assert exact * (1 - 1e-6) - 1e-9 <= total <= bound * (1 + 1e-6) + 1e-9


def test_noise_walks_clusters_and_copies_converge_between_their_bounds() -> None:
    """Clusters far apart by up to 100,000 epsilon are the hard ones: potentials must move as far."""
    check_random_batches(0, 100)


@pytest.mark.drill
def test_many_more_of_them() -> None:
    for seed in range(1, 21):
        check_random_batches(seed, 200)
