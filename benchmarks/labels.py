"""Optimal-transport labels: assay, a loop over POT, and OTT-JAX, on the same episodes and at equal accuracy.

    python benchmarks/labels.py [--lengths 27 121 484 1000] [--each 2] [--rounds 3]
    python benchmarks/labels.py --throughput 1000 10000 100000

Episodes are those of examples/hopper/hopper-replay.hdf5 nearest to the given lengths, the demonstration is the first
episode of hopper-expert.hdf5 (1,000 steps); cosine cost, epsilon 0.01. An error is the largest of an episode's rewards,
relative to its largest reward, from a float64 answer whose marginal error is below 1e-10. Every method gets the fewest
iterations that bring its error to 1e-4; the paper's 100 iterations are timed besides. All are run in turns, round after
round, so that whatever else the machine does falls on each alike.

OTT-JAX is left out, aloud, where it is not installed. It need not share an environment with assay:
PYTHONPATH=<assay>:<site-packages of assay> <environment with ott-jax>/bin/python benchmarks/labels.py
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import ot
import torch

from data.readers import recognise
from data.trajectories import Trajectories, concatenate
from labelers.evidence import Demonstrations, Evidence
from labelers.optimal_transport import OptimalTransport

HOPPER = Path(__file__).parents[1] / "examples" / "hopper"
CPU = torch.device("cpu")
EPSILON, ALPHA, BETA = 0.01, 5.0, 5.0
EQUAL = 1e-4
PADDED = 1000
BUDGETS = (100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000)
PATIENCE = 60.0
"""Seconds for one episode; a method that is not there by then is reported where it stands."""

Rewards = list[np.ndarray]
Method = Callable[[list[np.ndarray]], Rewards]
"""Rewards of some episodes, given the observations [T, d] of each."""


def read(path: Path) -> Trajectories:
    with recognise(path).open(path) as source:
        return concatenate([block.trajectories for block in source.blocks()])


def costs(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    norms = np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(y, axis=1)
    return np.clip(1 - x @ y.T / (norms + 1e-8), 0, 2)


def squashed(row_costs: np.ndarray, width: int) -> np.ndarray:
    return ALPHA * np.exp(-BETA / width * row_costs)


def assay(demonstration: np.ndarray, **settings: object) -> Method:
    labeler = OptimalTransport.model_validate({"demonstrations": Demonstrations(episodes=(0,)), **settings})

    def label(episodes: list[np.ndarray]) -> Rewards:
        data = tracks(episodes)
        fitted = labeler.fit(data, Evidence("x", demonstrations=tracks([demonstration])), device=CPU)
        return np.split(fitted.label(data).rewards, data.offsets[1:-1])

    return label


def tracks(episodes: list[np.ndarray]) -> Trajectories:
    lengths = [len(e) for e in episodes]
    return Trajectories(
        observations=np.concatenate([np.concatenate([e, e[-1:]]) for e in episodes]).astype(np.float32),
        actions=np.zeros((sum(lengths), 1), np.float32),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        terminated=np.zeros(len(lengths), bool),
        truncated=np.ones(len(lengths), bool),
        final_observed=np.zeros(len(lengths), bool),
    )


def pot(demonstration: np.ndarray, iterations: int) -> Method:
    """POT's log-domain Sinkhorn in float64, an episode at a time."""

    def label(episodes: list[np.ndarray]) -> Rewards:
        rewards = []
        for x in episodes:
            cost = costs(x.astype(np.float64), demonstration.astype(np.float64))
            n, m = cost.shape
            plan = ot.sinkhorn(
                np.full(n, 1 / n),
                np.full(m, 1 / m),
                cost,
                EPSILON,
                method="sinkhorn_log",
                numItermax=iterations,
                stopThr=0,
                warn=False,
            )
            rewards.append(squashed((plan * cost).sum(1) * n, x.shape[1]))
        return rewards

    return label


def ott(demonstration: np.ndarray, iterations: int) -> Method:
    """OTT-JAX in float32, jitted and vmapped, episodes padded to `PADDED` steps of no weight as the official code."""
    import jax
    from jax import numpy as jnp
    from ott.geometry import geometry
    from ott.problems.linear import linear_problem
    from ott.solvers.linear import sinkhorn

    solver = sinkhorn.Sinkhorn(threshold=0.0, min_iterations=iterations, max_iterations=iterations)

    def one(x: jax.Array, n: jax.Array, y: jax.Array) -> jax.Array:
        norms = jnp.linalg.norm(x, axis=1)[:, None] * jnp.linalg.norm(y, axis=1)
        cost = jnp.clip(1 - x @ y.T / (norms + 1e-8), 0, 2)
        weights = jnp.where(jnp.arange(PADDED) < n, 1 / n, 0.0).astype(np.float32)
        problem = linear_problem.LinearProblem(geometry.Geometry(cost_matrix=cost, epsilon=EPSILON), a=weights)
        row_costs = (solver(problem).matrix * cost).sum(1) * n
        return ALPHA * jnp.exp(-BETA / x.shape[1] * row_costs)

    solve = jax.jit(jax.vmap(one, in_axes=(0, 0, None)))

    def label(episodes: list[np.ndarray]) -> Rewards:
        lengths = np.array([len(e) for e in episodes])
        padded = np.stack([np.pad(e, ((0, PADDED - len(e)), (0, 0))) for e in episodes]).astype(np.float32)
        found = np.asarray(solve(padded, lengths.astype(np.float32), demonstration.astype(np.float32)))
        return [row[:n] for row, n in zip(found, lengths, strict=True)]

    return label


def error(rewards: Rewards, truth: Rewards) -> float:
    return max(float(np.abs(r - t).max() / np.abs(t).max()) for r, t in zip(rewards, truth, strict=True))


@dataclass
class Entry:
    name: str
    method: Method
    error: float
    seconds: list[float] = field(default_factory=list)


def at_equal_accuracy(name: str, make: Callable[[int], Method], episodes: list[np.ndarray], truth: Rewards) -> Entry:
    """The method with the smallest budget that is right to `EQUAL`, or where patience ends."""
    for budget in BUDGETS:
        method = make(budget)
        method(episodes)  # compiled once
        started = time.perf_counter()
        found = error(method(episodes), truth)
        seconds = time.perf_counter() - started
        if found <= EQUAL or budget == BUDGETS[-1] or 3 * seconds > PATIENCE * len(episodes):
            break
    said = f"{name}, {budget:,} iterations"
    return Entry(said if found <= EQUAL else f"{said} (not there)", method, found, [seconds])


def compare(lengths: list[int], each: int, rounds: int) -> None:
    replay, expert = read(HOPPER / "hopper-replay.hdf5"), read(HOPPER / "hopper-expert.hdf5")
    demonstration = expert.select([0]).step_observations
    has_ott = importlib.util.find_spec("ott") is not None
    if not has_ott:
        print("ott-jax is not installed: left out")
    threads = torch.get_num_threads()
    print(f"{os.cpu_count()} cores, torch {torch.__version__} with {threads} threads, POT {ot.__version__}")
    for length in lengths:
        nearest = np.argsort(np.abs(replay.lengths - length), kind="stable")[:each]
        sample = replay.select(nearest)
        episodes = np.split(sample.step_observations, sample.offsets[1:-1])
        truth = assay(demonstration, tolerance=1e-11)(episodes)
        ours = assay(demonstration)
        entries = [
            Entry("assay, default", ours, error(ours(episodes), truth)),
            at_equal_accuracy("POT", lambda n: pot(demonstration, n), episodes, truth),
            Entry(
                "assay, preset paper", (paper := assay(demonstration, preset="paper")), error(paper(episodes), truth)
            ),
            Entry("POT, 100 iterations", (loop := pot(demonstration, 100)), error(loop(episodes), truth)),
        ]
        if has_ott:
            hundred = ott(demonstration, 100)
            entries += [
                Entry("OTT-JAX, 100 iterations", hundred, error(hundred(episodes), truth)),
                at_equal_accuracy("OTT-JAX", lambda n: ott(demonstration, n), episodes, truth),
            ]
        for _ in range(rounds):
            for entry in entries:
                if len(entry.seconds) and entry.seconds[0] > PATIENCE / 4:
                    continue
                started = time.perf_counter()
                entry.method(episodes)
                entry.seconds.append(time.perf_counter() - started)
        print(f"\n{len(episodes)} episodes of {min(map(len, episodes))} to {max(map(len, episodes))} steps")
        base = statistics.median(entries[0].seconds)
        for entry in entries:
            median = statistics.median(entry.seconds)
            each_takes = f"{median / len(episodes):9.4f} s an episode  x{median / base:8.1f}"
            print(f"  {entry.name:42} {each_takes}  error {entry.error:.1e}")


def throughput(counts: list[int]) -> None:
    """Episodes a second and memory, for ever more short episodes of noise around a circle."""
    rng = np.random.default_rng(0)

    def walk(n: int) -> np.ndarray:
        angle = np.cumsum(rng.uniform(0, 0.1, n))
        return np.stack([np.cos(angle), np.sin(angle), np.ones(n)], 1) + rng.normal(0, 0.1, (n, 3))

    label = assay(walk(100))
    for count in counts:
        data = [walk(n) for n in rng.integers(10, 40, count)]
        started = time.perf_counter()
        label(data)
        seconds = time.perf_counter() - started
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(f"{count:9,} episodes: {count / seconds:8.0f} a second, peak memory {memory:7.0f} MiB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[27, 121, 484, 1000])
    parser.add_argument("--each", type=int, default=2, help="episodes of each length")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--throughput", type=int, nargs="+", help="numbers of episodes, instead of the comparison")
    chosen = parser.parse_args()
    if chosen.throughput:
        throughput(chosen.throughput)
    else:
        compare(chosen.lengths, chosen.each, chosen.rounds)
