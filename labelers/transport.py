"""Entropic optimal transport between many point sets and one, solved to convergence.

For each problem, with costs C [n, m] and uniform weights a = 1/n, b = 1/m, the plan P minimises
sum P C + epsilon sum P (log P - 1) over P >= 0 with row sums a and column sums b (Cuturi 2013). It has the form
P = exp((f_i + g_j - C_ij) / epsilon). The potentials f, g are found in three stages, for a batch of problems at once:

1. epsilon scaling (Schmitzer 2019): from the size of the costs down to epsilon, potentials carried along;
2. absorbed, over-relaxed Sinkhorn sweeps (Thibault et al. 2021): with f and g folded into the kernel it is close to the
   plan, so it does not underflow, and a sweep is two matrix-vector products in float32;
3. Newton's method on the dual in float64, by the Schur complement on the shorter side (Brauer et al. 2017). The
   residuals are float64 and the factor is float32: a step gains several digits, and its size tells the error before it.

Sinkhorn alone would stop short: at epsilon 0.01 and a thousand steps, marginals right to 1e-5 still leave rewards wrong
in the third digit. Here a problem is converged when a Newton step no longer changes the cost of any row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

RELAXATION = 1.85
CAUTIOUS = 1.5
"""Over-relaxation on the way down, and when Newton's method was not ready afterwards."""
LEVEL_FACTOR = 4.0
SWEEPS = 20
"""Sweeps at each level of epsilon scaling, and between two attempts of Newton's method."""
RANGE = 13.8
"""Scalings are folded into the potentials when their logarithm leaves +-13.8 (a factor of 1e6)."""
READY = 1e-2
"""Marginal error below which Newton's method is tried."""
NEWTON_STEPS = 12
PRECISE = 1e-5
"""Marginal error below which a Newton step that gains nothing is tried again with a float64 matrix."""
STEP_LIMIT = 3.0
"""Longest Newton step of any potential, in units of epsilon."""
BLOCK = 256
"""Rows of Newton's symmetric matrix that are multiplied out together, up to the diagonal."""
TINY = 1e-35
FLOOR = -60.0
"""Exponents below this one (1e-26 of a row's largest entry) are raised to it: denormal numbers are a hundred times
slower than others, and what is that small adds nothing."""
NEGLIGIBLE = 1e-18
"""Plan entries below this are left out of Newton's matrix, where they are multiplied with each other in float32."""


class Outcome(StrEnum):
    """How a problem ended, and what to do about it."""

    CONVERGED = "converged"
    STEP_LIMIT = "step limit reached: raise max_iterations or epsilon"


@dataclass(frozen=True, eq=False)
class Solution:
    """What B problems came to.

    row_costs: [B, n] float64, sum_j P_ij C_ij / a_i, the mean cost that row i pays; 0 on padded rows.
    marginal_errors: [B] float64, sum of absolute errors of the column sums; row sums are exact.
    iterations: [B] int64, Sinkhorn sweeps and Newton steps. converged: [B] bool.
    """

    row_costs: Tensor
    marginal_errors: Tensor
    iterations: Tensor
    converged: Tensor


@torch.no_grad()
def solve(costs: Tensor, n_rows: Tensor, epsilon: float, *, tolerance: float, max_iterations: int) -> Solution:
    """Solve B problems of different length against one set of columns.

    costs: [B, n, m] float64, padded along n. n_rows: [B] int64, rows that count; what padding holds does not matter.
    tolerance: largest change of any row cost in the last Newton step, relative to the largest row cost of the problem.
    max_iterations: sweeps and Newton steps at the most; a problem that needs more comes back not converged.
    """
    problems = _Problems(costs, n_rows, epsilon)
    for level in _levels(problems.largest_cost, epsilon):
        problems.sweep(level, RELAXATION)
    done = torch.zeros_like(n_rows, dtype=torch.bool)
    row_costs = torch.zeros_like(problems.f)
    errors = torch.full_like(problems.f[:, 0], torch.inf)
    iterations = torch.zeros_like(n_rows)
    active = torch.arange(len(n_rows), device=costs.device)
    patient = False
    while True:
        converged = problems.polish(tolerance, patient)
        row_costs[active, : problems.f.shape[1]], errors[active] = problems.row_costs, problems.errors
        iterations[active], done[active] = problems.iterations, converged
        going_on = ~converged & (problems.iterations < max_iterations)
        if not going_on.any():
            return Solution(row_costs, errors, iterations, done)
        active, problems = active[going_on], problems.only(going_on)
        problems.sweep(epsilon, CAUTIOUS, torch.float64)
        patient = True


def _levels(largest_cost: float, epsilon: float) -> list[float]:
    """Falling values of epsilon, from the largest cost to the one asked for."""
    levels = [epsilon]
    while levels[-1] * LEVEL_FACTOR < largest_cost:
        levels.append(levels[-1] * LEVEL_FACTOR)
    return levels[::-1]


class _Problems:
    """B problems on their way: potentials in float64, f [B, n] and g [B, m]; padded rows have no mass."""

    def __init__(self, costs: Tensor, n_rows: Tensor, epsilon: float) -> None:
        b, n, m = costs.shape
        self.epsilon = epsilon
        self.n_rows = n_rows
        self.is_row = torch.arange(n, device=costs.device) < n_rows[:, None]
        self.padded = int(n_rows.min()) < n
        self.costs = costs.masked_fill(~self.is_row[:, :, None], 0.0) if self.padded else costs
        self.a = 1.0 / n_rows.double()[:, None]
        self.b = 1.0 / m
        self.f = torch.zeros(b, n, dtype=torch.float64, device=costs.device)
        self.g = torch.zeros(b, m, dtype=torch.float64, device=costs.device)
        self.iterations = torch.zeros_like(n_rows)
        self.largest_cost = float(self.costs.max())
        self.row_costs = torch.zeros_like(self.f)
        self.errors = torch.full_like(self.f[:, 0], torch.inf)

    def only(self, chosen: Tensor) -> _Problems:
        """Some of the problems, at the same point, padded no further than they need."""
        n = int(self.n_rows[chosen].max())
        rest = _Problems(self.costs[chosen, :n], self.n_rows[chosen], self.epsilon)
        rest.f, rest.g, rest.iterations = self.f[chosen, :n], self.g[chosen], self.iterations[chosen]
        return rest

    def kernel(self, epsilon: float, dtype: torch.dtype = torch.float32) -> Tensor:
        """exp((f + g - C) / epsilon) [B, n, m], with f moved so that the largest entry of each row is 1."""
        exponent = torch.sub(self.g[:, None, :], self.costs)
        top = exponent.amax(2)
        self.f = -top
        exponent.sub_(top[:, :, None]).div_(epsilon).clamp_(min=FLOOR)
        return exponent.to(dtype).exp_()

    def sweep(self, epsilon: float, relaxation: float, dtype: torch.dtype = torch.float32) -> None:
        """Over-relaxed Sinkhorn: columns, then rows, `SWEEPS` times, the first time without relaxation."""
        a, is_row = self.a.to(dtype), self.is_row
        kernel = self.kernel(epsilon, dtype)
        log_v = torch.zeros_like(self.g, dtype=dtype)
        log_u = torch.log(a / (kernel.sum(2) + TINY)).masked_fill_(~is_row, -torch.inf)
        for sweep in range(SWEEPS):
            factor = relaxation if sweep else 1.0
            column_sums = torch.bmm(log_u.exp()[:, None, :], kernel)[:, 0] * log_v.exp()
            log_v += factor * torch.log(self.b / (column_sums + TINY))
            row_sums = torch.bmm(kernel, log_v.exp()[:, :, None])[:, :, 0] * log_u.exp()
            log_u += factor * torch.log(a / (row_sums + TINY)).masked_fill_(~is_row, 0.0)
            if sweep + 1 < SWEEPS and max(float(log_v.abs().max()), 0.0) > RANGE:
                self.g += epsilon * log_v
                kernel = self.kernel(epsilon, dtype)
                log_v.zero_()
                log_u = torch.log(a / (kernel.sum(2) + TINY)).masked_fill_(~is_row, -torch.inf)
        self.f += (epsilon * log_u).double()
        self.g += (epsilon * log_v).double()
        self.iterations += SWEEPS

    def plan(self, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Plan [B, n, m] for column potentials g, with exact row sums; its column sums [B, m]; the dual's value [B].

        The dual, sum a f + sum b g for the f that makes row sums exact, is concave in g and largest at the solution.
        """
        exponent = torch.sub(g[:, None, :], self.costs).div_(self.epsilon)
        top = exponent.amax(2)
        exponent -= top[:, :, None]
        plan = exponent.clamp_(min=FLOOR).exp_()
        sums = plan.sum(2)
        f = -self.epsilon * (top + torch.log(sums))
        dual = (self.a * f).masked_fill(~self.is_row, 0.0).sum(1) + self.b * g.sum(1)
        plan *= (self.a / sums).masked_fill(~self.is_row, 0.0)[:, :, None]
        return plan, plan.sum(1), dual

    def polish(self, tolerance: float, patient: bool) -> Tensor:
        """Newton's method for the problems that are ready for it. Returns [B] bool, which are converged.

        patient: whether a shortened step that only raises the dual is taken; at first, sweeps gain more.
        """
        converged = torch.zeros_like(self.errors, dtype=torch.bool)
        plan, column_sums, dual = self.plan(self.g)
        self.errors = (column_sums - self.b).abs().sum(1)
        self.row_costs = self._row_costs(plan)
        moving = self.errors < READY
        precise = torch.zeros_like(moving)
        for _ in range(NEWTON_STEPS):
            index = moving.nonzero()[:, 0]
            if not len(index):
                break
            whole = len(index) == len(moving)
            part = self if whole else self.only(index)
            n = part.f.shape[1]
            dtype = torch.float64 if bool(precise[index].any()) else torch.float32
            step, shortened = part._newton_step(plan if whole else plan[index, :n], column_sums[index], dtype)
            g = self.g[index] + step
            new_plan, new_sums, new_dual = part.plan(g)
            new_errors = (new_sums - self.b).abs().sum(1)
            # Where the plan falls into parts that hardly touch, potentials have far to go before the error falls.
            ascends = shortened & (new_dual > dual[index]) & (new_errors < 1.01 * self.errors[index])
            better = (new_errors < 0.8 * self.errors[index]) | (new_errors < 1e-12) | (ascends & patient)
            new_costs = part._row_costs(new_plan)
            change = (new_costs - self.row_costs[index, :n]).abs().amax(1) / new_costs.abs().amax(1).clamp_min(TINY)
            accepted = index[better]
            self.iterations[index] += 1
            self.g[accepted] = g[better]
            self.errors[accepted] = new_errors[better]
            self.row_costs[accepted, :n] = new_costs[better]
            column_sums[accepted], dual[accepted] = new_sums[better], new_dual[better]
            if whole and bool(better.all()):
                plan = new_plan
            else:
                plan[accepted, :n] = new_plan[better]
            converged[index] = better & ~shortened & (change < tolerance)
            near = self.errors[index] < PRECISE
            moving[index] = ~converged[index] & (better | (near & ~precise[index]))
            precise[index] = near & ~better
        return converged

    def _newton_step(self, plan: Tensor, column_sums: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Change of g [B, m] that removes the error of the column sums to first order, row sums being exact, and
        whether it was shortened [B] to `STEP_LIMIT`.

        dtype: of the matrix that is factored. Directions in which the problem is almost flat need float64.
        """
        damping = 1e-6 if dtype == torch.float32 else 1e-13
        small = torch.nn.functional.threshold(plan.to(dtype), NEGLIGIBLE, 0.0)
        residual = self.b - column_sums
        n, m = plan.shape[1:]
        rows = self.a.masked_fill(~self.is_row, 1.0)
        if m <= n:
            diagonal, right = column_sums, residual
            schur = _lower_product((small / rows.to(dtype)[:, :, None]).transpose(1, 2), small).neg_()
        else:
            diagonal = self.a * self.is_row
            right = -torch.bmm(plan, (residual / column_sums)[:, :, None])[:, :, 0]
            schur = _lower_product(small / column_sums.to(dtype)[:, None, :], small.transpose(1, 2)).neg_()
        k = schur.shape[1]
        scale = diagonal.sum(1) / (self.n_rows if m > n else m)
        schur += (scale / k).to(dtype)[:, None, None]
        at = torch.arange(k, device=plan.device)
        schur[:, at, at] += (diagonal + damping * scale[:, None]).to(dtype)
        if m > n and self.padded:
            schur[:, at, at] += (~self.is_row).to(dtype)
        factor, failed = torch.linalg.cholesky_ex(schur)
        solution = torch.cholesky_solve(right.to(dtype)[:, :, None], factor)[:, :, 0].double()
        if m > n:
            solution = (residual - torch.bmm(plan.transpose(1, 2), solution[:, :, None])[:, :, 0]) / column_sums
        solution = torch.where(failed[:, None] > 0, 0.0, solution)
        longest = solution.abs().amax(1, keepdim=True).clamp_min(STEP_LIMIT)
        return self.epsilon * solution * (STEP_LIMIT / longest), longest[:, 0] > STEP_LIMIT

    def _row_costs(self, plan: Tensor) -> Tensor:
        return torch.einsum("bnm,bnm->bn", plan, self.costs) / self.a


def _lower_product(left: Tensor, right: Tensor) -> Tensor:
    """Lower triangle of the symmetric product left [B, k, l] @ right [B, l, k]; what is above it may be anything."""
    k = left.shape[1]
    product = left.new_zeros(len(left), k, k)
    for start in range(0, k, BLOCK):
        stop = min(start + BLOCK, k)
        product[:, start:stop, :stop] = torch.bmm(left[:, start:stop], right[:, :, :stop])
    return product


@torch.no_grad()
def log_domain_sinkhorn(
    costs: Tensor, n_rows: Tensor, epsilon: float, max_iterations: int, check_every: int, threshold: float
) -> Solution:
    """Plain Sinkhorn in the log domain from f = 0, columns then rows, stopped after a fixed number of iterations.

    What Luo et al. (2023) run, by their library: the marginal error is looked at every `check_every` iterations, and
    the plan is used wherever it stands. Row sums are exact, column sums are not. costs, n_rows: as for `solve`.
    """
    is_row = torch.arange(costs.shape[1], device=costs.device) < n_rows[:, None]
    kernel = (-costs / epsilon).masked_fill(~is_row[:, :, None], -torch.inf)
    n_columns = costs.shape[2]
    log_a, log_b = -torch.log(n_rows.double())[:, None], -math.log(n_columns)
    f = torch.zeros(costs.shape[:2], dtype=torch.float64, device=costs.device)
    g = torch.zeros(len(costs), n_columns, dtype=torch.float64, device=costs.device)
    done = torch.zeros_like(n_rows, dtype=torch.bool)
    errors = torch.full_like(f[:, 0], torch.inf)
    iterations = torch.zeros_like(n_rows)
    for iteration in range(1, max_iterations + 1):
        new_g = log_b - torch.logsumexp(kernel + f[:, :, None], 1)
        new_f = log_a - torch.logsumexp(kernel + new_g[:, None, :], 2)
        g, f = torch.where(done[:, None], g, new_g), torch.where(done[:, None], f, new_f.masked_fill(~is_row, 0.0))
        iterations += ~done
        if iteration % check_every == 0 or iteration == max_iterations:
            plan = (kernel + f[:, :, None] + g[:, None, :]).exp()
            errors = (plan.sum(1) - 1 / n_columns).abs().sum(1)
            done |= errors < threshold
            if done.all():
                break
    plan = (kernel + f[:, :, None] + g[:, None, :]).exp()
    row_costs = (plan * costs.masked_fill(~is_row[:, :, None], 0.0)).sum(2) * n_rows[:, None]
    return Solution(row_costs, errors, iterations, done)
