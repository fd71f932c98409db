"""The comparison: means and spreads by hand, agreement by scipy, and tables that fit a terminal."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from scipy.stats import spearmanr

from pipelines.comparison import Comparison, agreement, spread
from pipelines.tables import comparison_table


def test_mean_and_sample_standard_deviation_over_seeds() -> None:
    # deviations -2, 0, 2: variance 8 / 2
    assert (spread([1, 3, 5]).mean, spread([1, 3, 5]).std, spread([1, 3, 5]).n) == (3, 2, 3)
    assert (spread([7]).mean, spread([7]).std) == (7, None)
    assert (spread([]).mean, spread([]).std, spread([]).n) == (None, None, 0)


def test_agreement_is_that_of_numpy_and_scipy() -> None:
    rng = np.random.default_rng(0)
    reference = rng.normal(size=60).astype(np.float32)
    rewards = np.round(reference + rng.normal(size=60), 1).astype(np.float32)  # with ties
    offsets = np.array([0, 7, 20, 21, 40, 60])
    found = agreement(rewards, reference, offsets)
    returns, truths = (np.add.reduceat(r.astype(float), offsets[:-1]) for r in (rewards, reference))
    assert found.pearson_steps == pytest.approx(np.corrcoef(rewards, reference)[0, 1])
    assert found.spearman_steps == pytest.approx(spearmanr(rewards, reference).statistic)
    assert found.pearson_returns == pytest.approx(np.corrcoef(returns, truths)[0, 1])
    assert found.spearman_returns == pytest.approx(spearmanr(returns, truths).statistic)


def test_agreement_of_constant_labels_is_not_defined() -> None:
    reference = np.arange(6, dtype=np.float32)
    found = agreement(np.full(6, 0.3, np.float32), reference, np.array([0, 2, 6]))
    assert found.pearson_steps is None and found.spearman_steps is None
    assert found.pearson_returns == pytest.approx(1)  # episodes of 2 and 4 steps


def comparison(algorithms: list[str]) -> Comparison:
    labelers = ["source", "optimal_transport", "multiple_instance"]
    numbers: dict[str, Any] = {"rewards": {}, "returns": {}}
    full = dict.fromkeys(("pearson_steps", "spearman_steps", "pearson_returns", "spearman_returns"), -0.123)
    return Comparison.model_validate(
        {
            "study": "s",
            "id": "i",
            "complete": True,
            "data": [
                {
                    "dataset": "halfcheetah-medium-expert",
                    "digest": "d",
                    "n_episodes": 2000,
                    "n_steps": 2_000_000,
                    "unit": "normalised score",
                    "score": 24.0,
                }
            ],
            "labels": [
                {
                    "dataset": "halfcheetah-medium-expert",
                    "labeler": name,
                    "label_id": "x",
                    "agreement": full,
                    "convergence": "converged 2000/2000",
                    "notes": ["something odd"],
                    **numbers,
                }
                for name in labelers
            ],
            "scores": [
                {
                    "dataset": "halfcheetah-medium-expert",
                    "algorithm": algorithm,
                    "labeler": name,
                    "scores": {0: 101.0, 1: 103.0},
                    "mean": 102.0,
                    "std": 1.4,
                    "n": 2,
                }
                for algorithm in algorithms
                for name in labelers
            ],
        }
    )


@pytest.mark.parametrize(
    ("algorithms", "width"), [([], 80), (["iql"], 80), (["iql", "decision_transformer", "bc"], 100)]
)
def test_a_table_fits_a_terminal_and_shortens_nothing(algorithms: list[str], width: int) -> None:
    out = io.StringIO()
    Console(file=out, width=width).print(comparison_table(comparison(algorithms), "halfcheetah-medium-expert"))
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    for word in ("source", "optimal_transport", "multiple_instance", "-0.123", "converged 2000/2000", *algorithms):
        assert word in text
    assert text.count("102.0 ± 1.4") == 3 * len(algorithms)
    assert text.count("something odd") == 3
