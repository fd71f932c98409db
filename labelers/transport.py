"""Entropic optimal transport between many pairs of point sets, solved to convergence.

For each problem, with costs C [n, m] and uniform weights a = 1/n, b = 1/m, the plan P minimises
sum P C + epsilon sum P (log P - 1) over P >= 0 with row sums a and column sums b (Cuturi 2013). It has the form
P = exp((f_i + g_j - C_ij) / epsilon). The potentials f, g are found in three stages, for a batch of problems at once:

1. epsilon scaling (Schmitzer 2019): from the size of the costs down to epsilon, potentials carried along;
2. absorbed, over-relaxed Sinkhorn sweeps (Thibault et al. 2021): with f and g folded into the kernel it is close to the
   plan, so it does not underflow, and a sweep is two matrix-vector products in float32;
3. Newton's method on the dual in float64, by the Schur complement on the shorter side (Brauer et al. 2017). The
   residuals are float64 and the matrix is float32: a step gains several digits, and its size tells the error before it.
   The matrix is factored once; the later steps take a few conjugate gradients preconditioned by that factor. Steps are
   limited in length, and raise the dual where they do not lower the error.

Sinkhorn alone would stop short: at epsilon 0.01 and a thousand steps, marginals right to 1e-5 still leave rewards wrong
in the third digit. Here a problem is converged when a Newton step no longer changes the cost of any row, and the error
fell tenfold with it or is too small to matter: an almost flat dual lets small steps look like the end.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum

import torch
from torch import Tensor

RELAXATION = 1.85
CAUTIOUS = 1.5
"""Over-relaxation on the way down, and when Newton's method was not ready afterwards."""
LEVEL_FACTOR = 4.0
SWEEPS, CHECK_EVERY = 30, 3
"""Sweeps at each level of epsilon scaling, and between two attempts of Newton's method, at most."""
SETTLED, LAST_SETTLED = 0.05, 0.01
"""Marginal error that is small enough to go on to the next level, or after the last one to Newton's method."""
RANGE = 13.8
"""Scalings are folded into the potentials when their logarithm leaves +-13.8 (a factor of 1e6)."""
READY = 0.03
"""Marginal error below which Newton's method is tried; after more sweeps it is tried wherever they end."""
NEWTON_STEPS = 30
ASCENT = 0.1
"""A Newton step is taken if the error falls, or if the dual rises by this part of what its slope promises. Where the
plan falls into parts that hardly touch, potentials have far to go before the error falls."""
STEP_LIMIT = 3.0
"""Longest Newton step of any potential at first, in units of epsilon. It doubles when such a step is taken, and falls
to a quarter when a step is not."""
PRECISE = 1e-6
"""Marginal error from which on a step that does not lower it tenfold asks for a better matrix."""
GRADIENT_STEPS = 10
"""Conjugate gradients with an earlier factor before the matrix is factored anew."""
RESIDUAL = 1e-2
"""What they leave of the residual."""
BLOCK = 256
"""Rows of Newton's symmetric matrix that are multiplied out together, up to the diagonal."""
DAMPING, DAMPING_DOUBLE = 1e-6, 1e-13
"""Added to the diagonal of a matrix in float32 or float64, in units of its mean."""
TINY, SMALLEST = 1e-35, 1e-300
"""What keeps divisors of float32 and of float64 from zero."""
FLOOR = -60.0
"""Exponents below this one (1e-26 of a row's largest entry) are raised to it: denormal numbers are a hundred times
slower than others, and what is that small adds nothing."""
NEGLIGIBLE = 1e-18
"""Plan entries below this are left out of Newton's matrix, where they are multiplied with each other in float32."""
EARLIER, FRESH, FRESH_DOUBLE = 0, 1, 2
"""Which factor Newton's method uses, in the order in which they are tried. Directions in which the dual is almost flat
need float64."""
NOWHERE = -1e30
"""Potential of a padded column: nothing is moved there."""


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
def solve(
    costs: Tensor, n_rows: Tensor, n_columns: Tensor, epsilon: float, *, tolerance: float, max_iterations: int
) -> Solution:
    """Solve B problems of different size.

    costs: [B, n, m] float64, padded. n_rows, n_columns: [B] int64, rows and columns that count; what padding holds does
    not matter. tolerance: largest change of any row cost in the last Newton step, relative to the largest row cost of
    the problem. max_iterations: sweeps and Newton steps at most; a problem that needs more comes back not converged.
    """
    problems = _Problems(costs / epsilon, n_rows, n_columns)
    g = torch.zeros_like(problems.b).masked_fill_(~problems.is_column, NOWHERE)
    iterations = torch.zeros_like(n_rows)
    for level in _levels(float(problems.costs.max())):
        g, sweeps = problems.sweep(g, level, RELAXATION, SETTLED if level > 1 else LAST_SETTLED)
        iterations += sweeps
    row_costs = torch.zeros_like(costs[:, :, 0])
    errors = torch.full_like(costs[:, 0, 0], torch.inf)
    converged = torch.zeros_like(n_rows, dtype=torch.bool)
    active = torch.arange(len(n_rows), device=costs.device)
    ready = READY
    while True:
        end = problems.polish(g, tolerance, ready)
        row_costs[active], errors[active], converged[active] = epsilon * end.row_costs, end.errors, end.converged
        iterations[active] += end.steps
        going_on = ~end.converged & (iterations[active] < max_iterations)
        if not going_on.any():
            return Solution(row_costs, errors, iterations, converged)
        active, problems = active[going_on], problems.only(going_on)
        g, sweeps = problems.sweep(end.g[going_on], 1.0, CAUTIOUS, 0.0, torch.float64)
        iterations[active] += sweeps
        ready = torch.inf


def _levels(largest_cost: float) -> list[float]:
    """Falling multiples of epsilon, from the largest cost to 1."""
    levels = [1.0]
    while levels[-1] * LEVEL_FACTOR < largest_cost:
        levels.append(levels[-1] * LEVEL_FACTOR)
    return levels[::-1]


@dataclass(eq=False)
class _Point:
    """Column potentials g [B, m] and what follows from them when row sums are exact.

    plan: [B, n, m]. column_sums: [B, m]. errors: [B], of the column sums. row_costs: [B, n]. dual: [B], the dual's
    value, sum a f + sum b g, which is concave in g and largest at the solution.
    """

    g: Tensor
    plan: Tensor
    column_sums: Tensor
    errors: Tensor
    row_costs: Tensor
    dual: Tensor

    def only(self, chosen: Tensor) -> _Point:
        return _Point(*(getattr(self, f.name)[chosen] for f in fields(self)))

    def take(self, other: _Point, chosen: Tensor) -> None:
        """Go to the other point where chosen [B]."""
        for f in fields(self):
            getattr(self, f.name)[chosen] = getattr(other, f.name)[chosen]


@dataclass(eq=False)
class _End:
    """Where Newton's method left B problems, after how many steps [B], and which of them converged [B]."""

    g: Tensor
    errors: Tensor
    row_costs: Tensor
    steps: Tensor
    converged: Tensor


class _Problems:
    """B problems in units of epsilon: costs [B, n, m], and weights a [B, n] and b [B, m]; all 0 on padding."""

    def __init__(self, costs: Tensor, n_rows: Tensor, n_columns: Tensor) -> None:
        n, m = costs.shape[1:]
        self.n_rows, self.n_columns = n_rows, n_columns
        self.is_row = torch.arange(n, device=costs.device) < n_rows[:, None]
        self.is_column = torch.arange(m, device=costs.device) < n_columns[:, None]
        self.a, self.b = self.is_row / n_rows.double()[:, None], self.is_column / n_columns.double()[:, None]
        if int(n_rows.min()) < n or int(n_columns.min()) < m:
            costs = costs.masked_fill(~(self.is_row[:, :, None] & self.is_column[:, None, :]), 0.0)
        self.costs = costs

    def only(self, chosen: Tensor) -> _Problems:
        return _Problems(self.costs[chosen], self.n_rows[chosen], self.n_columns[chosen])

    def sweep(
        self, g: Tensor, level: float, relaxation: float, settled: float, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, int]:
        """Over-relaxed Sinkhorn at epsilon times level: columns, then rows, until every problem is `settled`.

        Returns g and the number of sweeps, the first of which is not relaxed.
        """
        log_a, log_b = self.a.log().to(dtype), self.b.clamp_min(TINY).log().to(dtype)
        is_padding, is_column = ~self.is_row, self.is_column.to(dtype)
        log_v = torch.zeros_like(log_b)
        for sweep in range(SWEEPS):
            if sweep == 0 or float(log_v.abs().max()) > RANGE:
                g = g + level * log_v
                kernel = self._kernel(g, level, dtype)
                log_u, log_v = log_a - kernel.sum(2).log(), torch.zeros_like(log_b)
            sums = _product(log_u.exp(), kernel).clamp_min_(TINY)
            goal = (log_b - sums.log()).mul_(is_column)
            if sweep and sweep % CHECK_EVERY == 0 and float((goal - log_v).abs().mean(1).max()) < settled:
                return g + level * log_v, sweep
            factor = relaxation if sweep else 1.0
            log_v = log_v.lerp(goal, factor)
            sums = _product(log_v.exp(), kernel.mT).clamp_min_(TINY)
            log_u = log_u.lerp(log_a - sums.log(), factor).masked_fill_(is_padding, -torch.inf)
        return g + level * log_v, SWEEPS

    def _kernel(self, g: Tensor, level: float, dtype: torch.dtype) -> Tensor:
        """exp((f + g - C) / level) [B, n, m], with the f that makes the largest entry of each row 1."""
        exponent = torch.sub(g[:, None, :], self.costs)
        exponent = exponent.sub_(exponent.amax(2, keepdim=True)).to(dtype)
        return exponent.div_(level).clamp_(min=FLOOR).exp_()

    def at(self, g: Tensor) -> _Point:
        exponent = torch.sub(g[:, None, :], self.costs)
        top = exponent.amax(2, keepdim=True)
        plan = exponent.sub_(top).clamp_(min=FLOOR).exp_()
        sums = plan.sum(2)
        dual = (self.b * g).sum(1) - (self.a * (top[:, :, 0] + sums.log())).sum(1)
        plan *= (self.a / sums)[:, :, None]
        column_sums = plan.sum(1)
        errors = (column_sums - self.b).abs().sum(1)
        row_costs = (plan * self.costs).sum(2) * self.n_rows[:, None]
        return _Point(g, plan, column_sums, errors, row_costs, dual)

    def polish(self, g: Tensor, tolerance: float, ready: float) -> _End:
        """Newton's method from g, for the problems whose error is below ready.

        A matrix is factored once, and serves later steps to precondition conjugate gradients; a step that gains nothing
        is tried again with a new one, and then with one in float64.
        """
        here = self.at(g)
        n_steps, converged = torch.zeros_like(self.n_rows), torch.zeros_like(self.is_row[:, 0])
        end = _End(g.clone(), here.errors.clone(), here.row_costs.clone(), n_steps, converged)
        moving = (here.errors < ready).nonzero()[:, 0]
        part = self
        factor, attempt = None, FRESH
        if not len(moving):
            return end
        if len(moving) < len(g):
            part, here = self.only(moving), here.only(moving)
        limit = torch.full_like(here.errors, STEP_LIMIT)
        for _ in range(NEWTON_STEPS):
            if factor is None:
                matrix = _Schur.of(part, here, torch.float32 if attempt == FRESH else torch.float64)
                factor = matrix.factor()
            else:
                matrix = _Schur.of(part, here, factor.dtype)
            step, solved = part.newton_step(here, matrix, factor)
            longest = step.abs().amax(1)
            shortened = longest > limit
            step *= torch.where(shortened, limit / longest, 1.0)[:, None]
            new = part.at(here.g + step)
            slope = ((part.b - here.column_sums) * step).sum(1)
            ascends = (slope > 0) & (new.dual - here.dual > ASCENT * slope)
            better = (new.errors < 0.8 * here.errors) | (new.errors < 1e-12) | ascends
            change = (new.row_costs - here.row_costs).abs().amax(1) / new.row_costs.abs().amax(1).clamp_min(TINY)
            quick = new.errors < 0.1 * here.errors
            sure = quick | (new.errors * part.n_rows < tolerance)
            finished = better & sure & ~shortened & (change < tolerance)
            slow = ~quick & ~shortened & (new.errors < PRECISE)
            if better.all():
                here = new
            else:
                here.take(new, better)
            limit = torch.where(better, torch.where(shortened, 2 * limit, limit), torch.minimum(limit, longest) / 4)
            end.g[moving], end.errors[moving], end.row_costs[moving] = here.g, here.errors, here.row_costs
            end.steps[moving] += 1
            end.converged[moving] = finished
            tries = torch.where(better & ~slow, EARLIER, attempt + 1)
            going_on = ~finished & (better | (tries <= FRESH_DOUBLE))
            if not going_on.any():
                break
            attempt = max(min(int(tries[going_on].max()), FRESH_DOUBLE), EARLIER if solved else FRESH)
            if not going_on.all():
                moving, factor, limit = moving[going_on], factor[going_on], limit[going_on]
                part, here = part.only(going_on), here.only(going_on)
            if attempt != EARLIER:
                factor = None
        return end

    def newton_step(self, here: _Point, matrix: _Schur, factor: Tensor) -> tuple[Tensor, bool]:
        """Change of g [B, m] that removes the error of the column sums to first order, and whether it was found.

        matrix: of this point. factor: of this or an earlier point's matrix.
        """
        missing = (self.b - here.column_sums) * self.is_column
        right = missing if self.by_columns else -_product(missing / here.column_sums, here.plan.mT)
        step, solved = _conjugate_gradients(matrix, right, factor)
        if not self.by_columns:
            step = (missing - _product(step, here.plan)) / here.column_sums
        return torch.nan_to_num(step, 0.0, 0.0, 0.0) * self.is_column, solved

    @property
    def by_columns(self) -> bool:
        """Whether columns are the shorter side, of length k."""
        return self.costs.shape[2] <= self.costs.shape[1]


@dataclass(frozen=True, eq=False)
class _Schur:
    """Newton's matrix, minus the dual's second derivative: the Schur complement on the shorter side of B problems.

    On columns it is diag(c) - P' diag(1/a) P, with the plan P and its column sums c; on rows diag(a) - P diag(1/c) P'.
    Both are positive semidefinite, and a little damping keeps them apart from zero.

    plan: P or P' [B, l, k], without what is negligible. weight: [B, l] or [B, 1], one over the sums of the longer side.
    diagonal: [B, k], damping included.
    """

    plan: Tensor
    weight: Tensor
    diagonal: Tensor

    @classmethod
    def of(cls, problems: _Problems, here: _Point, dtype: torch.dtype) -> _Schur:
        plan = torch.nn.functional.threshold(here.plan.to(dtype), NEGLIGIBLE, 0.0)
        if problems.by_columns:
            sums, counts, weight = here.column_sums, problems.is_column, problems.n_rows[:, None]
        else:
            sums, counts, weight, plan = problems.a, problems.is_row, 1.0 / here.column_sums, plan.mT
        mean = sums.sum(1, keepdim=True) / counts.sum(1, keepdim=True)
        damping = (DAMPING if dtype == torch.float32 else DAMPING_DOUBLE) * mean
        return cls(plan, weight.to(dtype), (torch.where(counts, sums, mean) + damping).to(dtype))

    def times(self, x: Tensor) -> Tensor:
        """[B, k], of x [B, k]."""
        return self.diagonal * x - _product(_product(x, self.plan.mT) * self.weight, self.plan)

    def factor(self) -> Tensor:
        """Cholesky factor [B, k, k]; what the potentials sum to is held, as the dual does not change with it."""
        matrix = _lower_product((self.plan * self.weight[:, :, None]).mT, self.plan).neg_()
        k = matrix.shape[1]
        matrix += (self.diagonal.sum(1) / k**2)[:, None, None]
        matrix.diagonal(dim1=1, dim2=2).add_(self.diagonal)
        factor: Tensor = torch.linalg.cholesky_ex(matrix).L
        return factor


def _conjugate_gradients(matrix: _Schur, right: Tensor, factor: Tensor) -> tuple[Tensor, bool]:
    """Solution [B, k] float64 of B linear systems, and whether each is right to `RESIDUAL`.

    factor: Cholesky factor of a matrix like this one, which preconditions; of this one itself, a step or two is enough.
    """
    size = torch.linalg.vector_norm(right, torch.inf, 1, keepdim=True).clamp_min(SMALLEST)
    residual = (right / size).to(factor.dtype)
    goal = RESIDUAL * residual.norm(dim=1)
    solution, direction, slope = torch.zeros_like(residual), torch.zeros_like(residual), torch.ones_like(goal)
    for _ in range(GRADIENT_STEPS):
        descent = torch.cholesky_solve(residual[:, :, None], factor)[:, :, 0]
        earlier, slope = slope, (residual * descent).sum(1)
        direction = descent + (slope / earlier.clamp_min(TINY))[:, None] * direction
        image = matrix.times(direction)
        length = (slope / (direction * image).sum(1).clamp_min(TINY))[:, None]
        solution += length * direction
        residual -= length * image
        solved = bool((residual.norm(dim=1) <= goal).all())
        if solved:
            break
    return size * solution.double(), solved


def _product(vectors: Tensor, matrices: Tensor) -> Tensor:
    """[B, l], from [B, k] and [B, k, l]: from the left, which for B > 1 is ten times as fast as from the right."""
    return torch.bmm(vectors[:, None, :], matrices)[:, 0]


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
    costs: Tensor,
    n_rows: Tensor,
    n_columns: Tensor,
    epsilon: float,
    max_iterations: int,
    check_every: int,
    threshold: float,
) -> Solution:
    """Plain Sinkhorn in the log domain from f = 0, columns then rows, stopped after a fixed number of iterations.

    What Luo et al. (2023) run, by their library: the marginal error is looked at every `check_every` iterations, and
    the plan is used wherever it stands. Row sums are exact, column sums are not. The first four: as for `solve`.
    """
    is_row = torch.arange(costs.shape[1], device=costs.device) < n_rows[:, None]
    is_column = torch.arange(costs.shape[2], device=costs.device) < n_columns[:, None]
    entries = is_row[:, :, None] & is_column[:, None, :]
    kernel = (-costs / epsilon).masked_fill(~entries, -torch.inf)
    log_a, log_b = -torch.log(n_rows.double())[:, None], -torch.log(n_columns.double())[:, None]
    f, g = torch.zeros_like(costs[:, :, 0]), torch.zeros_like(costs[:, 0, :])
    done = torch.zeros_like(n_rows, dtype=torch.bool)
    errors = torch.full_like(costs[:, 0, 0], torch.inf)
    iterations = torch.zeros_like(n_rows)
    for iteration in range(1, max_iterations + 1):
        new_g = (log_b - torch.logsumexp(kernel + f[:, :, None], 1)).masked_fill(~is_column, 0.0)
        new_f = (log_a - torch.logsumexp(kernel + new_g[:, None, :], 2)).masked_fill(~is_row, 0.0)
        g, f = torch.where(done[:, None], g, new_g), torch.where(done[:, None], f, new_f)
        iterations += ~done
        if iteration % check_every == 0 or iteration == max_iterations:
            plan = (kernel + f[:, :, None] + g[:, None, :]).exp()
            errors = (plan.sum(1) - is_column / n_columns.double()[:, None]).abs().sum(1)
            done |= errors < threshold
            if done.all():
                break
    plan = (kernel + f[:, :, None] + g[:, None, :]).exp()
    row_costs = (plan * costs.masked_fill(~entries, 0.0)).sum(2) * n_rows[:, None]
    return Solution(row_costs, errors, iterations, done)
