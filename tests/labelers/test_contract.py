"""What every registered labeler must do, whatever it goes by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch

from data.errors import StoreError
from data.labels import ActionLabels, AnyLabels
from data.trajectories import Trajectories
from labelers import AnyLabeler
from labelers.evidence import NOTHING, Evidence
from labelers.labeler import FittedLabeler, Labeler, LearningLabeler

Make = Callable[..., Trajectories]

pytestmark = [  # rewards and actions here are noise
    pytest.mark.filterwarnings("ignore:.*nothing was learned"),
    pytest.mark.filterwarnings("ignore:inverse_dynamics"),
]

CPU = torch.device("cpu")
KINDS: list[type[Labeler]] = list(get_args(get_args(AnyLabeler)[0]))
SETTINGS: dict[str, dict[str, object]] = {
    "source": {},
    "zero": {},
    "recorded": {"rewards": {"path": Path(__file__).parent / "files" / "rewards.parquet"}},
    "optimal_transport": {"demonstrations": {"episodes": [0, 2]}},
    "nearest_demonstration": {"demonstrations": {"episodes": [0, 2]}},
    "reward_model": {"rewards": {"fraction": 0.4}, "members": 2, "hidden": [8], "steps": 20},
    "multiple_instance": {"returns": {"fraction": 0.5}, "members": 2, "hidden": 4, "steps": 20},
    "unlabelled_zero": {"rewards": {"fraction": 0.4}},
    "optimistic": {"rewards": {"fraction": 0.4}, "members": 2, "hidden": [8], "steps": 20},
    "preference": {
        "preferences": {"kind": "file", "path": Path(__file__).parent / "files" / "preferences.json"},
        "members": 2,
        "hidden": [8],
        "steps": 20,
    },
    "inverse_dynamics": {"actions": {"fraction": 0.4}, "members": 2, "hidden": [8], "steps": 20},
}
"""Settings for each kind that label 6 short episodes in no time; a new kind is under contract once it is named here."""

LENGTHS = (9, 1, 14, 6, 11, 20)


class Lookup:
    """Evidence for one dataset: itself, a few demonstrations, and rewards."""

    def __init__(self, data: Trajectories, demonstrations: Trajectories, rewards: np.ndarray) -> None:
        self.data, self.demonstrations, self._rewards = data, demonstrations, rewards

    def trajectories(self, name: str) -> Trajectories:
        return self.data if name == "self" else self.demonstrations

    def rewards(self, name: str, labels: str) -> np.ndarray:
        assert (name, labels) == ("self", "source")
        return self._rewards

    def demonstrations_of_dataset(self) -> str | None:
        return "expert"


@pytest.fixture
def lookup(random_trajectories: Make) -> Lookup:
    data = random_trajectories(LENGTHS)
    rewards = np.random.default_rng(7).normal(size=data.n_steps).astype(np.float32)
    return Lookup(data, random_trajectories((8, 5, 12), seed=1), rewards)


def name_of(kind: type[Labeler]) -> str:
    return str(kind.model_fields["kind"].default)


@pytest.fixture(params=KINDS, ids=name_of)
def labeler(request: pytest.FixtureRequest) -> Labeler:
    kind: type[Labeler] = request.param
    return kind.model_validate(SETTINGS[name_of(kind)])


def evidence_of(labeler: Labeler, lookup: Lookup) -> Evidence:
    spec = labeler.evidence_spec
    return NOTHING if spec is None else spec.resolve(lookup)


def known(evidence: Evidence, steps: np.ndarray) -> np.ndarray | None:
    return None if evidence.known is None else evidence.known[steps]


def fit(labeler: Labeler, lookup: Lookup) -> tuple[FittedLabeler, Evidence]:
    evidence = evidence_of(labeler, lookup)
    return labeler.fit(lookup.data, evidence, device=CPU), evidence


def values(labels: AnyLabels) -> np.ndarray:
    return labels.actions if isinstance(labels, ActionLabels) else labels.rewards


def all_values(labeler: Labeler, lookup: Lookup) -> np.ndarray:
    fitted, evidence = fit(labeler, lookup)
    return values(fitted.label(lookup.data, evidence.known))


def test_every_kind_is_under_contract() -> None:
    assert {name_of(kind) for kind in KINDS} == SETTINGS.keys()


def test_every_step_gets_one_finite_label(labeler: Labeler, lookup: Lookup) -> None:
    fitted, evidence = fit(labeler, lookup)
    labels = fitted.label(lookup.data, evidence.known)
    labels.check(lookup.data)
    assert values(labels).dtype == np.float32
    assert isinstance(labels, ActionLabels) == (labeler.column == "actions")
    if labels.diagnostics is not None:
        assert labels.diagnostics.height == lookup.data.n_episodes


def test_the_same_input_gives_the_same_bits(labeler: Labeler, lookup: Lookup) -> None:
    assert all_values(labeler, lookup).tobytes() == all_values(labeler, lookup).tobytes()


@pytest.mark.parametrize("episodes", [[0], [1], [5, 0], [4, 2, 1, 3, 5, 0]], ids=str)
def test_sharding_and_order_change_no_label(labeler: Labeler, lookup: Lookup, episodes: list[int]) -> None:
    data = lookup.data
    fitted, evidence = fit(labeler, lookup)
    whole = fitted.label(data, evidence.known)
    steps = np.concatenate([np.arange(data.offsets[e], data.offsets[e + 1]) for e in episodes])
    part = fitted.label(data.select(episodes), known(evidence, steps))
    # sums in another order, in float32 networks
    assert values(part) == pytest.approx(values(whole)[steps], rel=1e-5, abs=1e-6)
    if whole.diagnostics is not None:
        assert part.diagnostics is not None
        assert part.diagnostics.columns == whole.diagnostics.columns


def test_rewards_that_are_no_evidence_are_not_seen(labeler: Labeler, lookup: Lookup) -> None:
    evidence = evidence_of(labeler, lookup)
    before = all_values(labeler, lookup)
    scrambled = np.random.default_rng(8).permutation(lookup.rewards("self", "source"))
    if evidence.rewards is not None:
        scrambled = np.where(np.isnan(evidence.rewards), scrambled, evidence.rewards)
    if evidence.returns is not None:
        known_episode = np.repeat(~np.isnan(evidence.returns), lookup.data.lengths)
        scrambled = np.where(known_episode, lookup.rewards("self", "source"), scrambled)
    other = Lookup(lookup.data, lookup.demonstrations, scrambled)
    assert evidence_of(labeler, other).digest == evidence.digest
    assert all_values(labeler, other).tobytes() == before.tobytes()


@pytest.mark.parametrize("kind", [k for k in KINDS if k.column == "actions"], ids=name_of)
def test_actions_that_are_no_evidence_are_not_seen(kind: type[Labeler], lookup: Lookup) -> None:
    labeler = kind.model_validate(SETTINGS[name_of(kind)])
    fitted, evidence = fit(labeler, lookup)
    before = values(fitted.label(lookup.data, evidence.known))
    assert evidence.actions is not None
    scrambled = np.random.default_rng(8).permutation(np.asarray(lookup.data.actions))
    unknown = np.isnan(evidence.actions)
    data = replace(lookup.data, actions=np.where(unknown, scrambled, lookup.data.actions))
    other = Lookup(data, lookup.demonstrations, lookup.rewards("self", "source"))
    assert evidence_of(labeler, other).digest == evidence.digest
    assert all_values(labeler, other).tobytes() == before.tobytes()
    assert before[~unknown].tobytes() == lookup.data.actions[~unknown].tobytes()


def test_progress_counts_every_episode_once(labeler: Labeler, lookup: Lookup) -> None:
    fitted, evidence = fit(labeler, lookup)
    done: list[int] = []
    fitted.label(lookup.data, evidence.known, done.append)
    assert sum(done) == lookup.data.n_episodes


def test_a_configuration_survives_json_and_keeps_its_identity(labeler: Labeler) -> None:
    again = type(labeler).model_validate_json(labeler.model_dump_json())
    assert again == labeler
    assert again.identity() == labeler.identity()
    assert "transforms" not in labeler.identity()
    assert labeler.evidence_field not in labeler.identity()


@pytest.mark.parametrize("kind", [k for k in KINDS if issubclass(k, LearningLabeler)], ids=name_of)
def test_what_is_learned_is_saved_and_loaded_whole(kind: type[LearningLabeler], lookup: Lookup, tmp_path: Path) -> None:
    labeler = kind.model_validate(SETTINGS[name_of(kind)])
    evidence = evidence_of(labeler, lookup)
    fitted = labeler.fit(lookup.data, evidence, device=CPU)
    path = tmp_path / "fitted.safetensors"
    labeler.save(fitted, path)
    loaded = labeler.load(path, device=CPU)
    before, after = (values(f.label(lookup.data, evidence.known)) for f in (fitted, loaded))
    assert after.tobytes() == before.tobytes()
    assert loaded.report == fitted.report
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(StoreError, match=r"fitted\.safetensors"):
        labeler.load(path, device=CPU)
