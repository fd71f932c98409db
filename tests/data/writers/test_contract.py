"""What every registered writer must do: whatever is exported and ingested again is what it was."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data.errors import ConfigurationError, StoreError
from data.export import export
from data.ingest import ingest
from data.labels import Labels, label_id
from data.readers import READERS, recognise
from data.readers.reader import Block
from data.store import Store, StoredDataset, StoredLabels
from data.trajectories import Trajectories
from data.writers import WRITERS
from data.writers.writer import Writer
from tests.data.writers.episodes import rewards_of, stored_episodes

NAMES = {"d4rl": "export.hdf5"}


@pytest.fixture(params=WRITERS, ids=lambda writer: writer.model_fields["kind"].default)
def writer(request: pytest.FixtureRequest) -> Writer:
    return request.param()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def name(writer: Writer) -> str:
    return NAMES.get(writer.kind, "export-v0")


def stored(store: Store, data: Trajectories, shard_bytes: int = 200) -> StoredDataset:
    return store.write_dataset("toy", [Block(data, None)], {"file": "toy"}, shard_bytes=shard_bytes)


def labelled(store: Store, dataset: StoredDataset, rewards: np.ndarray, kind: str = "made_up") -> StoredLabels:
    identity = label_id(dataset.digest, {"kind": kind}, 1, str(rewards.sum()))
    origin = {"labeler": {"kind": kind}, "evidence": None}
    return store.write_labels(dataset, identity, lambda index, shard, steps: Labels(rewards[steps]), origin)


def test_every_writer_has_a_reader_of_its_kind():
    kinds = {reader.model_fields["kind"].default for reader in READERS}
    assert {writer.model_fields["kind"].default for writer in WRITERS} <= kinds


@given(stored_episodes(), st.integers(1, 400), st.booleans())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_episodes_survive_export_and_ingestion(writer, tmp_path, data, shard_bytes, with_rewards):
    shutil.rmtree(tmp_path)
    store, again, path = Store(tmp_path / "store"), Store(tmp_path / "again"), tmp_path / name(writer)
    dataset, rewards = stored(store, data, shard_bytes), rewards_of(data)
    export(dataset, path, writer, labelled(store, dataset, rewards) if with_rewards else None)
    assert recognise(path).kind == writer.kind
    result = ingest(path, "again", again)
    assert result.dataset == dataset.digest == data.digest()
    assert (result.source_labels is not None) == with_rewards
    if with_rewards:
        found = np.asarray(again.labels(result.dataset, result.source_labels).rewards)
        assert found.tobytes() == rewards.tobytes()


def test_real_data_survives_with_rewards_of_any_label_set(writer, store, hopper, tmp_path):
    source = ingest(hopper / "hopper-expert.hdf5", "expert", store)
    dataset = store.dataset("expert")
    labels = labelled(store, dataset, -np.asarray(store.labels(source.dataset, source.source_labels).rewards))
    done: list[int] = []
    export(dataset, tmp_path / name(writer), writer, labels, done.append)
    assert sum(done) == dataset.manifest.n_steps
    result = ingest(tmp_path / name(writer), "again", store)
    assert result.dataset == source.dataset and result.source_labels != source.source_labels
    np.testing.assert_array_equal(store.labels(result.dataset, result.source_labels).rewards, labels.rewards)


def test_where_it_came_from_is_in_the_file(writer, store, random_trajectories, tmp_path):
    dataset = stored(store, random_trajectories())
    labels = labelled(store, dataset, np.ones(13, np.float32), "optimistic")
    export(dataset, tmp_path / name(writer), writer, labels)
    with recognise(tmp_path / name(writer)).open(tmp_path / name(writer)) as source:
        said = dict(source.metadata)
    assert said["assay_digest"] == dataset.digest and said["assay_dataset"] == "toy"
    assert said["assay_labels"] == labels.id and said["assay_labeler"] == "optimistic"


def test_missing_rewards_are_said(writer, store, random_trajectories, tmp_path):
    dataset = stored(store, random_trajectories())
    assert "no-rewards" in {f.code for f in export(dataset, tmp_path / name(writer), writer)}
    labels = labelled(store, dataset, np.ones(13, np.float32))
    assert "no-rewards" not in {f.code for f in export(dataset, tmp_path / f"2{name(writer)}", writer, labels)}


def test_nothing_is_overwritten(writer, store, random_trajectories, tmp_path):
    path = tmp_path / name(writer)
    path.write_text("precious")
    with pytest.raises(ConfigurationError, match=f"{path.name}: there is something of this name"):
        export(stored(store, random_trajectories()), path, writer)
    assert path.read_text() == "precious" and not list(tmp_path.glob(".*"))


def test_labels_of_another_dataset_are_refused_and_nothing_is_left(writer, store, random_trajectories, tmp_path):
    dataset, other = stored(store, random_trajectories()), stored(store, random_trajectories(seed=1))
    labels = labelled(store, other, np.ones(13, np.float32))
    with pytest.raises(StoreError, match=f"for dataset {other.digest}, not for 'toy' {dataset.digest}"):
        export(dataset, tmp_path / "out" / name(writer), writer, labels)
    assert not list((tmp_path / "out").iterdir())


def test_an_export_that_fails_half_way_leaves_nothing(writer, store, random_trajectories, tmp_path):
    dataset = stored(store, random_trajectories((5, 1, 7) * 4))

    def fail(done: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export(dataset, tmp_path / "out" / name(writer), writer, progress=fail)
    assert not list((tmp_path / "out").iterdir())
