"""`unlabelled_zero`: what is known stays, the rest is worth the least."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from data.errors import StoreError
from data.trajectories import Trajectories
from labelers.evidence import Evidence
from labelers.unlabelled_zero import UnlabelledZero

CPU = torch.device("cpu")
NAN = float("nan")


@pytest.fixture
def data() -> Trajectories:
    return Trajectories(
        observations=np.zeros((7, 2), np.float32),
        actions=np.zeros((5, 1), np.float32),
        offsets=np.array([0, 2, 5]),
        terminated=np.array([True, False]),
        truncated=np.array([False, True]),
        final_observed=np.ones(2, bool),
    )


def test_known_rewards_stay_and_the_rest_get_the_lowest_known(data: Trajectories) -> None:
    known = np.array([0.1, NAN, NAN, -0.3, 2], np.float32)
    fitted = UnlabelledZero().fit(data, Evidence("x", rewards=known), device=CPU)
    expected = np.array([0.1, -0.3, -0.3, -0.3, 2], np.float32)
    assert fitted.label(data, known).rewards.tolist() == expected.tolist()
    assert fitted.label(data).rewards.tolist() == [np.float32(-0.3)] * 5


def test_the_paper_gives_0(data: Trajectories) -> None:
    known = np.array([0.1, NAN, NAN, -0.3, 2], np.float32)
    fitted = UnlabelledZero(fill="zero").fit(data, Evidence("x", rewards=known), device=CPU)
    assert fitted.label(data, known).rewards.tolist() == np.array([0.1, 0, 0, -0.3, 2], np.float32).tolist()


def test_both_are_the_same_on_tasks_that_pay_0_or_1(data: Trajectories) -> None:
    known = np.array([NAN, 1, 0, NAN, NAN], np.float32)
    evidence = Evidence("x", rewards=known)
    labels = [UnlabelledZero.model_validate({"fill": f}).fit(data, evidence, device=CPU) for f in ("minimum", "zero")]
    assert labels[0].label(data, known).rewards.tolist() == labels[1].label(data, known).rewards.tolist()


def test_saved_and_loaded_it_gives_the_same(data: Trajectories, tmp_path: Path) -> None:
    known = np.array([0.1, NAN, NAN, -0.3, 2], np.float32)
    labeler = UnlabelledZero()
    fitted = labeler.fit(data, Evidence("x", rewards=known), device=CPU)
    labeler.save(fitted, tmp_path / "fitted.safetensors")
    loaded = labeler.load(tmp_path / "fitted.safetensors", device=CPU)
    assert loaded.label(data, known).rewards.tolist() == fitted.label(data, known).rewards.tolist()
    assert loaded.report == fitted.report
    with pytest.raises(StoreError, match="load it with the configuration that it was fitted with"):
        UnlabelledZero(fill="zero").load(tmp_path / "fitted.safetensors", device=CPU)
