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
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import ot
import polars as pl
import torch
from pydantic import Field, model_validator
from torch import Tensor

from data.config import Config
from data.errors import DatasetError, WorkError
from data.labels import Labels
from data.trajectories import Trajectories
from labelers.evidence import Demonstrations, Evidence
from labelers.labeler import Labeler, Progress, silent
from labelers.memory import keep_freed_memory
from labelers.transport import Outcome, Solution, log_domain_sinkhorn, solve

BATCH_ENTRIES = 1 << 20
"""Entries of the cost matrices that are solved together: what a core's cache can work on."""

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

    version: ClassVar[int] = 2
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
        rows = []
        for episodes in _batches(trajectories.lengths, max(len(e) for e in self.experts)):
            lengths = torch.as_tensor(trajectories.lengths[episodes], device=self.device)
            points = self._padded(trajectories, episodes, int(lengths.max()))
            of_experts = [self._rewards(points, lengths, expert, episodes) for expert in self.experts]
            sums = torch.stack([r.sum(1) for r, _, _ in of_experts])
            chosen = sums.argmax(0).tolist()
            for place, (episode, expert) in enumerate(zip(episodes.tolist(), chosen, strict=True)):
                start, stop = trajectories.offsets[episode], trajectories.offsets[episode + 1]
                reward, solution, exact = of_experts[expert]
                rewards[start:stop] = reward[place, : stop - start].cpu().numpy()
                rows.append(
                    {
                        "episode": episode,
                        "outcome": self._outcome(solution, exact, place),
                        "demonstration": expert,
                        "iterations": int(solution.iterations[place]),
                        "marginal_error": float(solution.marginal_errors[place]),
                        "transport_cost": float(solution.row_costs[place].sum() / lengths[place]),
                    }
                )
            progress(len(episodes))
        return Labels(rewards, pl.DataFrame(rows).sort("episode").drop("episode"))

    def _rewards(
        self, points: Tensor, lengths: Tensor, expert: Tensor, episodes: np.ndarray
    ) -> tuple[Tensor, Solution, Tensor]:
        """Rewards [B, T] float64 by one demonstration, 0 on padding; which episodes the exact solver had to solve."""
        settings = self.settings
        costs = _costs(points, expert, settings.cost)
        if settings.preset == "paper":
            solution = log_domain_sinkhorn(
                costs, lengths, PAPER_EPSILON, PAPER_ITERATIONS, PAPER_CHECK_EVERY, PAPER_THRESHOLD
            )
            exact = torch.zeros_like(solution.converged)
        elif settings.solver == "exact":
            exact = torch.ones(len(lengths), dtype=torch.bool, device=lengths.device)
            solution = _solve_exactly(costs, lengths, exact, None)
        else:
            solution = solve(
                costs, lengths, settings.epsilon, tolerance=settings.tolerance, max_iterations=settings.max_iterations
            )
            exact = ~solution.converged
            if exact.any():
                self._report(solution, exact, episodes)
                solution = _solve_exactly(costs, lengths, exact, solution)
        squashing, width = settings.squashing, points.shape[2]
        if squashing is None:
            return -solution.row_costs / lengths[:, None], solution, exact
        rate = squashing.beta / width if squashing.per_dimension else squashing.beta
        is_step = torch.arange(points.shape[1], device=self.device) < lengths[:, None]
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

    def _padded(self, trajectories: Trajectories, episodes: np.ndarray, longest: int) -> Tensor:
        """Observations [B, longest, d] float64 at the steps of some episodes."""
        width = self.experts[0].shape[1]
        points = torch.zeros(len(episodes), longest, width, dtype=torch.float64, device=self.device)
        for place, episode in enumerate(episodes.tolist()):
            start, stop = trajectories.offsets[episode] + episode, trajectories.offsets[episode + 1] + episode
            points[place, : stop - start] = _points(trajectories.observations[start:stop], self.device)
        return points


def _points(observations: np.ndarray, device: torch.device) -> Tensor:
    """[T, d] float64."""
    return torch.from_numpy(observations.reshape(len(observations), -1).astype(np.float64)).to(device)


def _batches(lengths: np.ndarray, n_columns: int) -> Iterator[np.ndarray]:
    """Episodes by length, so that little is padded, as many at a time as `BATCH_ENTRIES` holds."""
    order = np.argsort(lengths, kind="stable")
    start = 0
    while start < len(order):
        stop = start + 1
        while stop < len(order) and (stop + 1 - start) * int(lengths[order[stop]]) * n_columns <= BATCH_ENTRIES:
            stop += 1
        yield order[start:stop]
        start = stop


def _costs(x: Tensor, y: Tensor, cost: str) -> Tensor:
    """[B, n, m] float64 costs between x [B, n, d] and y [m, d]."""
    if cost == "cosine":
        norms = x.norm(dim=2)[:, :, None] * y.norm(dim=1)
        similarity: Tensor = (x @ y.T) / (norms + 1e-8)
        return (1 - similarity).clamp_(0, 2)
    # Coordinates are subtracted, not multiplied out: near points would lose their distance to rounding.
    distances = torch.cdist(x, y[None], compute_mode="donot_use_mm_for_euclid_dist")
    return distances if cost == "euclidean" else distances.square_()


def _solve_exactly(costs: Tensor, lengths: Tensor, chosen: Tensor, solution: Solution | None) -> Solution:
    """Put the answer without entropy in place of the chosen problems' solutions."""
    if solution is None:
        n_rows = costs.shape[:2]
        solution = Solution(
            row_costs=torch.zeros(n_rows, dtype=torch.float64, device=costs.device),
            marginal_errors=torch.zeros(n_rows[0], dtype=torch.float64, device=costs.device),
            iterations=torch.zeros_like(lengths),
            converged=torch.zeros_like(chosen),
        )
    for place in chosen.nonzero()[:, 0].tolist():
        n = int(lengths[place])
        cost = costs[place, :n].cpu().numpy()
        n_columns = cost.shape[1]
        a, b = np.full(n, 1 / n), np.full(n_columns, 1 / n_columns)
        plan, log = ot.emd(a, b, cost, numItermax=10_000_000, log=True)
        if log["warning"] is not None or not math.isfinite(log["cost"]):
            raise WorkError(f"POT's exact solver failed on an episode of {n} steps: {log['warning']}.")
        solution.row_costs[place] = 0.0
        solution.row_costs[place, :n] = torch.from_numpy((plan * cost).sum(1) * n).to(costs.device)
        solution.marginal_errors[place] = float(np.abs(plan.sum(0) - b).sum())
    return solution
