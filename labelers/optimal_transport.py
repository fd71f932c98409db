"""`optimal_transport`: a step is worth what it takes to move its episode onto a demonstration. OTR.

Luo, Jiang, Cohen, Grefenstette and Deisenroth, "Optimal transport for offline imitation learning" (ICLR 2023). An
episode of T steps and a demonstration of T_e are two sets of observations with uniform weights 1/T and 1/T_e. Let P be
the entropic transport plan between them for costs C, and c_t = T sum_j P_tj C_tj the mean cost that step t pays. Its
reward is alpha exp(-beta c_t / d), d the width of an observation. Of several demonstrations an episode takes the one
that gives it the largest sum of rewards.

The official code gives every step the weight 1/1000, which for any length comes to the same c_t, and stops after 100
iterations, which for long episodes is far from converged. Here the plan is converged; `preset: paper` repeats the code.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import ot
import polars as pl
import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from data.config import Config
from data.errors import DatasetError, WorkError
from data.labels import Labels
from data.progress import Progress, silent
from data.trajectories import Trajectories
from labelers.evidence import Demonstrations, Evidence
from labelers.labeler import Labeler
from labelers.memory import keep_freed_memory
from labelers.transport import Outcome, Solution, log_domain_sinkhorn, solve

BATCH_ENTRIES = {"cpu": 1 << 19, "cuda": 1 << 25}
"""Entries of the cost matrices that one thread solves together: what a core has cache for, and what fills a GPU."""

MOST_WORKERS = 8
"""Threads that solve batches side by side; more would wait for the interpreter."""

PAPER_ITERATIONS = 100
PAPER_EPSILON = 0.01
PAPER_CHECK_EVERY = 10
PAPER_THRESHOLD = 1e-9


class Squashing(Config):
    """alpha exp(-beta c), with c divided by the width of an observation if `per_dimension`.

    The defaults are those of the official code on locomotion and Adroit; on AntMaze it uses beta 1 and no division.
    """

    alpha: float = Field(default=5.0, gt=0)
    beta: float = Field(default=5.0, gt=0)
    per_dimension: bool = True


class OptimalTransport(Labeler):
    """Closeness to demonstrations, by entropic optimal transport between observations.

    cost: of a step's observation x and a demonstration's y. cosine: 1 - x.y / (|x||y| + 1e-8), between 0 and 2, and 1
        where either is zero; euclidean: |x - y|; squared_euclidean: |x - y|^2.
    epsilon: weight of the entropy, in units of the cost. squashing: null for the raw reward -c_t / T, which sums to
        minus the transport cost.
    solver: sinkhorn, converged; exact, without entropy, by POT's network simplex.
    tolerance: relative error of rewards at which the plan is converged. max_iterations: the most that an episode gets.
    not_converged: what to do then. `error` stops; `warning` labels such an episode by the exact solver, and says so.
    preset: `paper` repeats the official code: cosine cost, epsilon 0.01, at most 100 iterations, wherever they end.
    """

    version: ClassVar[int] = 3
    kind: Literal["optimal_transport"] = "optimal_transport"
    demonstrations: Demonstrations
    cost: Literal["cosine", "euclidean", "squared_euclidean"] = "cosine"
    epsilon: float = Field(default=PAPER_EPSILON, gt=0)
    squashing: Squashing | None = Squashing()
    solver: Literal["sinkhorn", "exact"] = "sinkhorn"
    tolerance: float = Field(default=1e-6, gt=0)
    max_iterations: int = Field(default=5_000, gt=0)
    not_converged: Literal["error", "warning"] = "error"
    preset: Literal["paper"] | None = None

    @model_validator(mode="after")
    def _paper_leaves_no_choice(self) -> OptimalTransport:
        if self.preset == "paper":
            chosen = {"cost", "epsilon", "solver", "tolerance", "max_iterations"} & self.model_fields_set
            differing = sorted(n for n in chosen if getattr(self, n) != type(self).model_fields[n].default)
            if differing:
                raise ValueError(f"preset 'paper' fixes {', '.join(differing)}: leave it out, or the preset")
        return self

    def fit(
        self, trajectories: Trajectories, evidence: Evidence, *, device: torch.device, progress: Progress = silent
    ) -> FittedOptimalTransport:
        demonstrations = evidence.demonstrations
        assert demonstrations is not None
        widths = [int(np.prod(t.observations.shape[1:])) for t in (trajectories, demonstrations)]
        if widths[0] != widths[1]:
            raise DatasetError(
                f"observations of the demonstrations have {widths[1]} numbers and those of the dataset {widths[0]}: "
                "a cost between them is not defined. Name demonstrations of the same kind."
            )
        offsets = demonstrations.offsets
        points = _points(demonstrations.step_observations, device)
        experts = [points[offsets[e] : offsets[e + 1]] for e in range(demonstrations.n_episodes)]
        return FittedOptimalTransport(self, experts, device)


@dataclass(frozen=True, eq=False)
class FittedOptimalTransport:
    """Demonstrations at hand, [T_e, d] float64 each; nothing is learned."""

    settings: OptimalTransport
    experts: list[Tensor]
    device: torch.device

    def label(self, trajectories: Trajectories, known: np.ndarray | None = None, progress: Progress = silent) -> Labels:
        """Rewards, and for each episode its demonstration, transport cost, marginal error, iterations and outcome.

        Raises WorkError, naming the episode, if one does not converge and that is an error.
        """
        keep_freed_memory()
        rewards = np.empty(trajectories.n_steps, np.float32)
        best = [(-np.inf, 0)] * trajectories.n_episodes
        rows: list[dict[str, object]] = [{}] * trajectories.n_episodes
        lengths, expert_lengths = trajectories.lengths, np.array([len(e) for e in self.experts])
        to_compare = np.full(trajectories.n_episodes, len(self.experts))
        batches = list(_batches(lengths, expert_lengths, BATCH_ENTRIES[self.device.type]))
        for (episodes, experts), (reward, solution, exact) in zip(
            batches, self._side_by_side(trajectories, batches), strict=True
        ):
            sums = reward.sum(1).tolist()
            pairs = [(episode, expert) for episode in episodes.tolist() for expert in experts.tolist()]
            for place, (episode, expert) in enumerate(pairs):
                standing = (sums[place], -expert)
                if standing <= best[episode]:
                    continue
                best[episode] = standing
                start, stop = trajectories.offsets[episode], trajectories.offsets[episode + 1]
                rewards[start:stop] = reward[place, : stop - start].cpu().numpy()
                rows[episode] = {
                    "outcome": self._outcome(solution, exact, place),
                    "demonstration": expert,
                    "iterations": int(solution.iterations[place]),
                    "marginal_error": float(solution.marginal_errors[place]),
                    "transport_cost": float(solution.row_costs[place].sum() / (stop - start)),
                }
            to_compare[episodes] -= len(experts)
            progress(int((to_compare[episodes] == 0).sum()))
        return Labels(rewards, pl.DataFrame(rows))

    def _side_by_side(
        self, trajectories: Trajectories, batches: list[tuple[np.ndarray, np.ndarray]]
    ) -> Iterator[tuple[Tensor, Solution, Tensor]]:
        """Rewards of each batch in order, on as many cores as this process may use, or by one thread for a GPU.

        A batch is one thread's: hundreds of short operations shared by several make them wait for each other, and for
        whatever else runs; and results would depend on the number of threads in the last bits.
        """
        n_workers = min(MOST_WORKERS, len(os.sched_getaffinity(0))) if self.device.type == "cpu" else 1
        before = torch.get_num_threads()
        try:
            with ThreadPoolExecutor(n_workers, initializer=torch.set_num_threads, initargs=(1,)) as workers:
                yield from workers.map(lambda batch: self._rewards(trajectories, *batch), batches)
        finally:
            torch.set_num_threads(before)

    def _rewards(
        self, trajectories: Trajectories, episodes: np.ndarray, experts: np.ndarray
    ) -> tuple[Tensor, Solution, Tensor]:
        """Rewards [B, T] float64 of each of some episodes by each of some demonstrations, demonstrations varying
        fastest, 0 on padding; what the solver says; which of the B problems the exact solver had to solve."""
        settings = self.settings
        offsets = trajectories.offsets
        steps = [slice(offsets[e] + e, offsets[e + 1] + e) for e in episodes]
        points = pad_sequence([_points(trajectories.observations[s], self.device) for s in steps], batch_first=True)
        demonstrations = pad_sequence([self.experts[e] for e in experts], batch_first=True)
        (n_episodes, n, width), (n_experts, m, _) = points.shape, demonstrations.shape
        costs = _costs(points.reshape(-1, width), demonstrations.reshape(-1, width), settings.cost)
        costs = costs.view(n_episodes, n, n_experts, m).transpose(1, 2).reshape(-1, n, m)
        lengths = torch.as_tensor(trajectories.lengths[episodes], device=self.device).repeat_interleave(n_experts)
        expert_lengths = torch.tensor([len(self.experts[e]) for e in experts], device=self.device).repeat(n_episodes)
        if settings.preset == "paper":
            solution = log_domain_sinkhorn(
                costs, lengths, expert_lengths, PAPER_EPSILON, PAPER_ITERATIONS, PAPER_CHECK_EVERY, PAPER_THRESHOLD
            )
            exact = torch.zeros_like(solution.converged)
        elif settings.solver == "exact":
            exact = torch.ones_like(lengths, dtype=torch.bool)
            solution = _solve_exactly(costs, lengths, expert_lengths, exact, None)
        else:
            solution = solve(
                costs,
                lengths,
                expert_lengths,
                settings.epsilon,
                tolerance=settings.tolerance,
                max_iterations=settings.max_iterations,
            )
            exact = ~solution.converged
            if exact.any():
                self._report(solution, exact, episodes.repeat(n_experts))
                solution = _solve_exactly(costs, lengths, expert_lengths, exact, solution)
        if settings.squashing is None:
            return -solution.row_costs / lengths[:, None], solution, exact
        squashing = settings.squashing
        rate = squashing.beta / width if squashing.per_dimension else squashing.beta
        is_step = torch.arange(n, device=self.device) < lengths[:, None]
        return squashing.alpha * torch.exp(-rate * solution.row_costs) * is_step, solution, exact

    def _report(self, solution: Solution, stopped: Tensor, episodes: np.ndarray) -> None:
        first = int(stopped.nonzero()[0, 0])
        said = (
            f"transport of episode {episodes[first]} ({int(stopped.sum())} in its batch) did not converge: marginal "
            f"error {float(solution.marginal_errors[first]):.2g} after {int(solution.iterations[first])} iterations "
            f"({Outcome.STEP_LIMIT})"
        )
        if self.settings.not_converged == "error":
            raise WorkError(f"{said}, or set `not_converged: warning` to label such episodes by the exact solver.")
        warnings.warn(f"{said}; such episodes are labelled by the exact solver", stacklevel=2)

    def _outcome(self, solution: Solution, exact: Tensor, place: int) -> str:
        if exact[place]:
            return "exact"
        return (Outcome.CONVERGED if solution.converged[place] else Outcome.STEP_LIMIT).split(":")[0]


def _points(observations: np.ndarray, device: torch.device) -> Tensor:
    """[T, d] float64."""
    return torch.from_numpy(observations.reshape(len(observations), -1).astype(np.float64)).to(device)


def _batches(lengths: np.ndarray, expert_lengths: np.ndarray, entries: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Episodes and demonstrations, all of the ones to be compared with all of the others, until every pair was there.

    Both are taken by length, so that little is padded, as many at a time as fill cost matrices with `entries`.
    """
    order = np.argsort(lengths, kind="stable")
    for experts in _alike(expert_lengths):
        m = int(expert_lengths[experts].max())
        start = 0
        while start < len(order):
            stop = start + 1
            while stop < len(order) and (stop + 1 - start) * int(lengths[order[stop]]) * m * len(experts) <= entries:
                stop += 1
            at_a_time = max(1, entries // (int(lengths[order[stop - 1]]) * m))
            for first in range(0, len(experts), at_a_time):
                yield order[start:stop], experts[first : first + at_a_time]
            start = stop


def _alike(lengths: np.ndarray) -> list[np.ndarray]:
    """Demonstrations in groups in which the longest is at most a quarter longer than the shortest."""
    order = np.argsort(lengths, kind="stable")
    groups: list[list[int]] = []
    for expert in order.tolist():
        if not groups or 4 * lengths[expert] > 5 * lengths[groups[-1][0]]:
            groups.append([])
        groups[-1].append(expert)
    return [np.array(group) for group in groups]


def _costs(x: Tensor, y: Tensor, cost: str) -> Tensor:
    """[n, m] float64 costs between x [n, d] and y [m, d]."""
    if cost == "cosine":
        norms = x.norm(dim=1)[:, None] * y.norm(dim=1)
        return ((x @ y.T).div_(norms.add_(1e-8)).neg_() + 1).clamp_(0, 2)
    # Coordinates are subtracted, not multiplied out: near points would lose their distance to rounding.
    distances = torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist")
    return distances if cost == "euclidean" else distances.square_()


def _solve_exactly(
    costs: Tensor, n_rows: Tensor, n_columns: Tensor, chosen: Tensor, solution: Solution | None
) -> Solution:
    """Put the answer without entropy in place of the chosen problems' solutions."""
    if solution is None:
        solution = Solution(
            row_costs=torch.zeros_like(costs[:, :, 0]),
            marginal_errors=torch.zeros_like(costs[:, 0, 0]),
            iterations=torch.zeros_like(n_rows),
            converged=torch.zeros_like(chosen),
        )
    for place in chosen.nonzero()[:, 0].tolist():
        n, m = int(n_rows[place]), int(n_columns[place])
        cost = costs[place, :n, :m].cpu().numpy()
        b = np.full(m, 1 / m)
        plan, log = ot.emd(np.full(n, 1 / n), b, cost, numItermax=10_000_000, log=True)
        if log["warning"] is not None or not math.isfinite(log["cost"]):
            raise WorkError(f"POT's exact solver failed on an episode of {n} steps: {log['warning']}.")
        solution.row_costs[place] = 0.0
        solution.row_costs[place, :n] = torch.from_numpy((plan * cost).sum(1) * n).to(costs.device)
        solution.marginal_errors[place] = float(np.abs(plan.sum(0) - b).sum())
    return solution
