"""Label quality: how one label set compares with another on the same data, before anything is trained on either.

All numbers are float64. A label set says what the data's own transitions are worth and nothing of others, so:

- Correlations, rank agreement and calibration are plain statistics of the two columns.
- STARC (Skalse et al. 2024) is defined on data: rewards are canonicalised with the value of the data's own policy,
  c = r + discount V(s') - V(s), divided by their norm, and half the L2 distance is taken. V is the fixed point of
  temporal differences (LSTD, Bradtke and Barto 1996) in the features given by `_States`, and c is exact to potentials
  that are linear in those features. c is taken transition by transition, without an average over noise in s'.
- EPIC (Gleave et al. 2021) asks what made-up transitions are worth, and so is defined for reward functions only:
  `epic_distance`. For a pair of label sets it is None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
import polars as pl

from data.config import Config
from data.errors import DatasetError
from data.labels import episode_returns
from data.statistics import Moments, MomentsOf, moments_of, standardise
from data.trajectories import Trajectories

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RewardFunction: TypeAlias = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
"""Rewards [n] of any observations [n, ...], actions [n, ...] and next observations [n, ...]."""

CLUSTERS = 32
COLUMNS = 64
SAMPLE = 10_000
BLOCK = 1 << 14
BINS = 10


class Correlation(Config):
    """Pearson's and Spearman's correlation; None where either side is constant or there are fewer than two values.

    interval: 95 % for Spearman's, over independent values (Fisher's z with the variance of Fieller et al. 1957); None
        where values are not independent (steps) or fewer than four.
    """

    pearson: float | None
    spearman: float | None
    interval: tuple[float, float] | None = None


class WithinEpisodes(Config):
    """Spearman's correlation of the steps of one episode, mean over the `n_episodes` in which it is defined."""

    spearman: float | None
    n_episodes: int


class Spread(Config):
    """Of one label set under the data's policy. An almost flat reward teaches nothing, however accurate (Razin et al.
    2025).

    std: over all steps. std_given_state: root of the mean variance inside clusters of similar observations, weighted by
    steps: mostly what actions change, though states differ inside a cluster too. share: its part of the variance, None
    if all rewards are equal. clusters: number of steps and std of each.
    """

    std: float
    std_given_state: float
    share: float | None
    clusters: tuple[tuple[int, float], ...]


class Calibration(Config):
    """What the reference says where the labels say a value: steps in bins of equal count by label, ties kept together.

    bins: (steps, mean label, mean reference). slope, intercept: least squares of reference on labels; None if labels
    are constant. error: root mean square of (mean reference - mean label) over bins, weighted by steps, in the units of
    the labels: of meaning only if both are in one unit, as imputed rewards are.
    """

    bins: tuple[tuple[int, float, float], ...]
    slope: float | None
    intercept: float | None
    error: float


class Quality(Config):
    """A label set against a reference. starc, epic: distances in [0, 1], 0 for rewards that rank all policies alike.

    notes: what is not defined here, and why.
    """

    format: Literal["assay-label-quality/1"] = "assay-label-quality/1"
    n_steps: int
    n_episodes: int
    steps: Correlation
    returns: Correlation
    within_episodes: WithinEpisodes
    starc: float | None
    epic: float | None
    labels_spread: Spread
    reference_spread: Spread
    calibration: Calibration
    notes: tuple[str, ...]


def quality(
    labels: np.ndarray,
    reference: np.ndarray,
    trajectories: Trajectories,
    *,
    discount: float = 0.99,
    functions: tuple[RewardFunction, RewardFunction] | None = None,
    seed: int = 0,
) -> Quality:
    """Compare `labels` [N] with `reference` [N], both for the steps of `trajectories`.

    discount: in [0, 1), for STARC and EPIC. functions: that gave labels and reference, where both are functions of
    single transitions; EPIC is computed from them. seed: for clustering and sampling; the same seed gives the same
    numbers. Raises DatasetError if a value is missing or not finite.
    """
    for name, values in (("labels", labels), ("reference", reference)):
        if values.shape != (trajectories.n_steps,) or not np.isfinite(values).all():
            raise DatasetError(
                f"{name}: {values.shape}, {int((~np.isfinite(values)).sum())} of them not finite; quality needs one "
                f"finite value for each of {trajectories.n_steps:,} steps."
            )
    notes = []
    states = _States.of(trajectories, np.random.default_rng(seed))
    offsets = trajectories.offsets
    returns = correlation(episode_returns(labels, offsets), episode_returns(reference, offsets))
    within = _within_episodes(labels, reference, trajectories)
    if constant := [n for n, v in (("labels", labels), ("reference", reference)) if moments_of(v).constant[0]]:
        notes.append(f"correlations of steps are not defined: {' and '.join(constant)} never change.")
    if undefined := trajectories.n_episodes - within.n_episodes:
        notes.append(f"rank agreement inside an episode is not defined in {undefined:,}: one side never changes there.")
    if functions is None:
        notes.append("EPIC is not defined: labels do not say what made-up transitions are worth.")
    canonical = [_canonical(values, trajectories, states, discount) for values in (labels, reference)]
    if flat := [n for n, c in zip(("labels", "reference"), canonical, strict=True) if not c.any()]:
        notes.append(f"{' and '.join(flat)}: worth nothing but a potential, canonical reward 0 (norm 0 in STARC).")
    return Quality(
        n_steps=trajectories.n_steps,
        n_episodes=trajectories.n_episodes,
        steps=correlation(labels, reference),
        returns=returns.model_copy(update={"interval": _interval(returns.spearman, trajectories.n_episodes)}),
        within_episodes=within,
        starc=float(np.linalg.norm(_unit(canonical[0]) - _unit(canonical[1])) / 2),
        epic=None if functions is None else epic_distance(*functions, trajectories, discount=discount, seed=seed),
        labels_spread=_spread(labels, states.cluster[states.of_steps]),
        reference_spread=_spread(reference, states.cluster[states.of_steps]),
        calibration=_calibration(labels, reference),
        notes=tuple(notes),
    )


def correlation(x: np.ndarray, y: np.ndarray) -> Correlation:
    """Pearson's and Spearman's correlation of two columns [n], without an interval."""
    return Correlation(pearson=_pearson(x, y), spearman=_pearson(_ranks(x), _ranks(y)))


def epic_distance(
    first: RewardFunction,
    second: RewardFunction,
    trajectories: Trajectories,
    *,
    discount: float = 0.99,
    n_transitions: int = 1024,
    n_means: int = 16,
    seed: int = 0,
) -> float | None:
    """EPIC distance of two reward functions over the transitions of a dataset (Gleave et al. 2021, definition 4.1).

    Canonical reward of a transition: R(s, a, s') + discount E R(s', A, S') - E R(s, A, S') (a constant is left out: it
    does not change a correlation). A and S' are independent: all pairs of `n_means` actions and `n_means` observations,
    drawn from the data without replacement, as are the `n_transitions`. Episode ends are ignored, as in the official
    code. None if either canonical reward is constant.
    """
    rng = np.random.default_rng(seed)

    def drawn(index: np.ndarray, n: int) -> np.ndarray:
        return index if len(index) <= n else rng.choice(index, n, replace=False)

    usable = np.delete(np.arange(trajectories.n_steps), trajectories.offsets[1:][~trajectories.final_observed] - 1)
    steps = drawn(usable, n_transitions)
    rows = trajectories.observation_rows(steps)
    observations, next_observations = trajectories.observations[rows], trajectories.observations[rows + 1]
    mean_actions = trajectories.actions[drawn(usable, n_means)]
    mean_observations = trajectories.observations[trajectories.observation_rows(drawn(usable, n_means))]
    acted = np.repeat(mean_actions, len(mean_observations), axis=0)
    followed = np.concatenate([mean_observations] * len(mean_actions))

    def canonical(reward: RewardFunction) -> np.ndarray:
        def mean_from(at: np.ndarray) -> np.ndarray:
            made_up = (reward(np.repeat(row[None], len(acted), axis=0), acted, followed) for row in at)
            return np.array([values.astype(np.float64).mean() for values in made_up])

        own = reward(observations, trajectories.actions[steps], next_observations).astype(np.float64)
        shaped: np.ndarray = own + discount * mean_from(next_observations) - mean_from(observations)
        return shaped

    rho = _pearson(canonical(first), canonical(second))
    return None if rho is None else float(np.sqrt((1 - rho) / 2))


def plot(labels: np.ndarray, reference: np.ndarray, trajectories: Trajectories, found: Quality) -> Figure:
    """Labels against the reference in four panels: steps, episode returns, calibration, spread by cluster of states."""
    from matplotlib.figure import Figure  # a second to import, and only plots need it

    figure = Figure(figsize=(9, 7), layout="constrained")
    (steps, returns), (calibration, spread) = figure.subplots(2, 2)
    steps.hexbin(labels, reference, gridsize=60, bins="log", mincnt=1)
    steps.set(title=f"steps: {_said(found.steps)}", xlabel="label", ylabel="reference")
    offsets = trajectories.offsets
    returns.plot(episode_returns(labels, offsets), episode_returns(reference, offsets), ".", alpha=0.5)
    returns.set(title=f"episode returns: {_said(found.returns)}", xlabel="sum of labels", ylabel="sum of reference")
    _, label_means, reference_means = zip(*found.calibration.bins, strict=True)
    calibration.plot(label_means, reference_means, "o-")
    calibration.set(title=f"steps in {len(label_means)} bins by label", xlabel="mean label", ylabel="mean reference")
    for name, values in (("labels", found.labels_spread), ("reference", found.reference_spread)):
        parts = sorted(std / values.std if values.std else 0.0 for _, std in values.clusters)
        spread.plot(parts, ".-", label=name)
    spread.set(
        title="spread inside clusters of observations",
        xlabel="cluster, sorted",
        ylabel="std in the cluster / std of all steps",
        ylim=(0, None),
    )
    spread.legend()
    return figure


def _said(found: Correlation) -> str:
    pearson, spearman = ("undefined" if v is None else f"{v:.3f}" for v in (found.pearson, found.spearman))
    return f"Pearson {pearson}, Spearman {spearman}"


def _pearson(x: np.ndarray, y: np.ndarray) -> float | None:
    if len(x) < 2 or moments_of(x).constant[0] or moments_of(y).constant[0]:
        return None
    x, y = (v.astype(np.float64) - v.mean(dtype=np.float64) for v in (x, y))
    return float(np.clip(x @ y / np.sqrt((x @ x) * (y @ y)), -1.0, 1.0))


def _ranks(values: np.ndarray) -> np.ndarray:
    """[n] float64 ranks from 1; equal values share their mean rank."""
    return pl.Series(values).rank("average").to_numpy()


def _interval(rho: float | None, n: int) -> tuple[float, float] | None:
    if rho is None or n < 4:
        return None
    if abs(rho) == 1:
        return rho, rho
    half = 1.96 * np.sqrt(1.06 / (n - 3))
    return float(np.tanh(np.arctanh(rho) - half)), float(np.tanh(np.arctanh(rho) + half))


def _within_episodes(labels: np.ndarray, reference: np.ndarray, trajectories: Trajectories) -> WithinEpisodes:
    frame = pl.DataFrame({"episode": trajectories.episode_index, "x": labels, "y": reference})
    ranks = frame.select("episode", *(pl.col(c).rank("average").over("episode") for c in ("x", "y")))
    found = (
        ranks.group_by("episode", maintain_order=True)
        .agg(pl.corr("x", "y").alias("rho"))
        .filter(pl.col("rho").is_not_null() & pl.col("rho").is_finite())
    )
    return WithinEpisodes(spearman=found["rho"].mean() if len(found) else None, n_episodes=len(found))


def _calibration(labels: np.ndarray, reference: np.ndarray) -> Calibration:
    x, y = labels.astype(np.float64), reference.astype(np.float64)
    bin_of = ((_ranks(labels) - 0.5) / len(x) * BINS).astype(np.int64)
    _, place, count = np.unique(bin_of, return_inverse=True, return_counts=True)
    mean_x, mean_y = np.bincount(place, x) / count, np.bincount(place, y) / count
    slope = intercept = None
    if len(x) > 1 and not moments_of(labels).constant[0]:
        centred = x - x.mean()
        slope = float(centred @ y / (centred @ centred))
        intercept = float(y.mean() - slope * x.mean())
    return Calibration(
        bins=tuple((int(n), float(a), float(b)) for n, a, b in zip(count, mean_x, mean_y, strict=True)),
        slope=slope,
        intercept=intercept,
        error=float(np.sqrt(count @ (mean_y - mean_x) ** 2 / len(x))),
    )


def _spread(values: np.ndarray, cluster: np.ndarray) -> Spread:
    moments = moments_of(values)
    centred = values.astype(np.float64) - moments.mean[0]
    _, place, count = np.unique(cluster, return_inverse=True, return_counts=True)
    means = np.bincount(place, centred) / count
    variances = np.bincount(place, (centred - means[place]) ** 2) / count
    within, total = float(count @ variances / len(values)), float(moments.std[0] ** 2)
    return Spread(
        std=float(moments.std[0]),
        std_given_state=float(np.sqrt(within)),
        share=min(within / total, 1.0) if total > 0 else None,
        clusters=tuple((int(n), float(np.sqrt(v))) for n, v in zip(count, variances, strict=True)),
    )


@dataclass(frozen=True, eq=False)
class _States:
    """Features of observations: membership in one of up to 32 clusters, and the standardised columns themselves.

    Observations of more than 64 columns are first projected on 64 random directions. Rows are read in blocks.
    cluster: [N + E] of each observation row. of_steps: [N] rows of the steps.
    """

    trajectories: Trajectories
    moments: Moments
    projection: np.ndarray | None
    cluster: np.ndarray
    n_clusters: int
    of_steps: np.ndarray

    @classmethod
    def of(cls, trajectories: Trajectories, rng: np.random.Generator) -> _States:
        """Cluster by k-means on a sample of rows (k-means++ and ten rounds)."""
        n_rows = len(trajectories.observations)
        accumulated = MomentsOf()
        for rows in _blocks(n_rows):
            accumulated.update(_flat(trajectories, rows))
        moments = accumulated.moments()
        d = len(moments.mean)
        projection = rng.normal(size=(d, COLUMNS)) / np.sqrt(d) if d > COLUMNS else None
        sample = np.sort(rng.choice(n_rows, min(n_rows, SAMPLE), replace=False))
        points = _columns(trajectories, sample, moments, projection)
        centres = _centres(points, int(np.clip(len(points) // 50, 1, CLUSTERS)), rng)
        cluster = np.concatenate(
            [_nearest(_columns(trajectories, rows, moments, projection), centres) for rows in _blocks(n_rows)]
        )
        of_steps = np.arange(trajectories.n_steps) + trajectories.episode_index
        return cls(trajectories, moments, projection, cluster, len(centres), of_steps)

    def features(self, rows: np.ndarray) -> np.ndarray:
        """[n, clusters + columns] float64 of observation rows [n]."""
        members = np.eye(self.n_clusters)[self.cluster[rows]]
        return np.concatenate([members, _columns(self.trajectories, rows, self.moments, self.projection)], axis=1)


def _canonical(rewards: np.ndarray, trajectories: Trajectories, states: _States, discount: float) -> np.ndarray:
    """[M] r + discount V(s') - V(s) on the usable transitions; exact zeros if that is rounding beside the rewards."""
    steps = trajectories.transition_index
    matrix = np.zeros((0, 0))
    target = np.zeros(0)
    for block in _blocks(len(steps)):
        now, change = _now_and_change(steps[block], trajectories, states, discount)
        if not len(target):
            matrix, target = np.zeros((now.shape[1], now.shape[1])), np.zeros(now.shape[1])
        matrix -= now.T @ change
        target += now.T @ rewards[steps[block]].astype(np.float64)
    weights = np.linalg.lstsq(matrix, target, rcond=1e-10)[0] if len(target) else target
    canonical = rewards[steps].astype(np.float64)
    norm = np.linalg.norm(canonical)
    for block in _blocks(len(steps)):
        canonical[block] += _now_and_change(steps[block], trajectories, states, discount)[1] @ weights
    return canonical if np.linalg.norm(canonical) > 1e-6 * norm else np.zeros_like(canonical)


def _now_and_change(
    steps: np.ndarray, trajectories: Trajectories, states: _States, discount: float
) -> tuple[np.ndarray, np.ndarray]:
    """Features f(s), and discount f(s') - f(s) with f = 0 after a termination."""
    rows = trajectories.observation_rows(steps)
    now = states.features(rows)
    following = states.features(rows + 1) * trajectories.continues[steps, None]
    return now, discount * following - now


def _unit(vector: np.ndarray) -> np.ndarray:
    norm = np.linalg.norm(vector)
    return vector / norm if norm else vector


def _blocks(n: int) -> Iterator[np.ndarray]:
    return (np.arange(start, min(start + BLOCK, n)) for start in range(0, n, BLOCK))


def _flat(trajectories: Trajectories, rows: np.ndarray) -> np.ndarray:
    return trajectories.observations[rows].reshape(len(rows), -1)


def _columns(
    trajectories: Trajectories, rows: np.ndarray, moments: Moments, projection: np.ndarray | None
) -> np.ndarray:
    columns = standardise(_flat(trajectories, rows), moments).astype(np.float64)
    return columns if projection is None else columns @ projection


def _centres(points: np.ndarray, k: int, rng: np.random.Generator) -> np.ndarray:
    """[k, d] by k-means++ (Arthur and Vassilvitskii 2007) and ten rounds of Lloyd; a centre without points stays."""
    centres = points[rng.integers(len(points), size=1)]
    distance = ((points - centres[0]) ** 2).sum(1)
    while len(centres) < k and distance.any():
        centres = np.concatenate([centres, points[rng.choice(len(points), size=1, p=distance / distance.sum())]])
        distance = np.minimum(distance, ((points - centres[-1]) ** 2).sum(1))
    for _ in range(10):
        nearest = _nearest(points, centres)
        count = np.bincount(nearest, minlength=len(centres))
        sums = np.stack([np.bincount(nearest, column, len(centres)) for column in points.T], axis=1)
        centres = np.where(count[:, None] > 0, sums / np.maximum(count, 1)[:, None], centres)
    return centres


def _nearest(points: np.ndarray, centres: np.ndarray) -> np.ndarray:
    nearest: np.ndarray = ((centres**2).sum(1) - 2 * points @ centres.T).argmin(1)
    return nearest
