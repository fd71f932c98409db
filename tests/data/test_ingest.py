"""Ingestion: a file becomes a dataset and its `source` labels, once, and a bad file leaves the store as it was."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import h5py
import numpy as np
import pytest

from data.errors import DatasetError
from data.ingest import ingest, ingest_key
from data.readers.d4rl import D4RL
from data.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture
def arrays() -> dict[str, np.ndarray]:
    """Two episodes of 10 steps, truncated."""
    rng = np.random.default_rng(0)
    observations = np.concatenate([np.cumsum(rng.normal(size=(11, 3)), 0), 50 + np.cumsum(rng.normal(size=(11, 3)), 0)])
    observations = observations.astype(np.float32)
    steps = np.r_[0:10, 11:21]
    timeouts = np.zeros(20, bool)
    timeouts[[9, 19]] = True
    return {
        "observations": observations[steps],
        "next_observations": observations[steps + 1],
        "actions": rng.uniform(-1, 1, (20, 2)).astype(np.float32),
        "rewards": rng.normal(size=20).astype(np.float32),
        "terminals": np.zeros(20, bool),
        "timeouts": timeouts,
    }


def files(store: Store) -> dict[Path, int]:
    kept = [p for part in ("datasets", "labels", "ingests") for p in store.root.glob(f"{part}/**/*") if p.is_file()]
    return {p: p.stat().st_mtime_ns for p in kept}


def test_a_file_becomes_a_dataset_with_its_rewards_beside_it(store, write_hdf5, arrays):
    path = write_hdf5("a.hdf5", {"env": "Toy-v0"}, **arrays)
    result = ingest(path, "toy", store)
    dataset = store.dataset("toy")
    assert dataset.digest == result.dataset and dataset.trajectories().lengths.tolist() == [10, 10]
    labels = store.labels(result.dataset, result.source_labels)
    np.testing.assert_array_equal(labels.rewards, arrays["rewards"])
    assert labels.manifest.origin["labeler"] == {"kind": "source"}
    provenance = dataset.manifest.provenance
    assert provenance["file"] == "a.hdf5" and provenance["metadata"] == {"env": "Toy-v0"}
    assert provenance["reader"]["kind"] == "d4rl" and provenance["reader_version"] == 1
    assert dataset.manifest.findings == result.findings


def test_asked_again_nothing_is_done(store, write_hdf5, arrays, tmp_path):
    path = write_hdf5("a.hdf5", **arrays)
    result = ingest(path, "toy", store)
    before = files(store)
    moved = path.rename(tmp_path / "elsewhere.hdf5")
    assert ingest(moved, "toy", store) == result and files(store) == before
    assert not list(store.root.glob("partial/*"))


def test_the_key_is_of_content_reader_and_name(write_hdf5, arrays):
    path = write_hdf5("a.hdf5", **arrays)
    edited = write_hdf5("b.hdf5", **(arrays | {"rewards": arrays["rewards"] + 1}))
    keys = {
        ingest_key(path, "toy", D4RL()),
        ingest_key(edited, "toy", D4RL()),
        ingest_key(path, "other", D4RL()),
        ingest_key(path, "toy", D4RL(goals="first")),
    }
    assert len(keys) == 4


def test_what_was_deleted_is_made_again(store, write_hdf5, arrays):
    import shutil

    path = write_hdf5("a.hdf5", **arrays)
    result = ingest(path, "toy", store)
    shutil.rmtree(store.root / "labels")
    assert ingest(path, "toy", store) == result
    assert store.has_labels(result.dataset, result.source_labels)


def test_other_rewards_are_other_labels_of_the_same_dataset(store, write_hdf5, arrays):
    one = ingest(write_hdf5("a.hdf5", **arrays), "toy", store)
    two = ingest(write_hdf5("b.hdf5", **(arrays | {"rewards": arrays["rewards"][::-1]})), "toy", store)
    assert one.dataset == two.dataset and one.source_labels != two.source_labels
    assert len(store.datasets()) == 1


def test_the_same_content_in_another_file_is_the_same_dataset(store, arrays, tmp_path, write_hdf5):
    one = ingest(write_hdf5("a.hdf5", **arrays), "toy", store)
    with h5py.File(tmp_path / "packed.hdf5", "w") as file:
        for key, values in arrays.items():
            file.create_dataset(key, data=values, compression="gzip", chunks=True)
    two = ingest(tmp_path / "packed.hdf5", "toy", store)
    assert (one.dataset, one.source_labels) == (two.dataset, two.source_labels)


@pytest.mark.parametrize("change", ["order", "edit"])
def test_another_order_or_an_edited_action_is_another_dataset_without_the_labels(store, write_hdf5, arrays, change):
    one = ingest(write_hdf5("a.hdf5", **arrays), "toy", store)
    if change == "order":
        other = {key: np.concatenate([values[10:], values[:10]]) for key, values in arrays.items()}
    else:
        other = arrays | {"actions": arrays["actions"] + 1e-3 * (np.arange(20) == 12)[:, None].astype(np.float32)}
    two = ingest(write_hdf5("b.hdf5", **other), "toy", store)
    assert one.dataset != two.dataset
    assert not store.has_labels(two.dataset, one.source_labels)


def test_without_rewards_there_are_no_source_labels(store, write_hdf5, arrays):
    del arrays["rewards"]
    assert ingest(write_hdf5("a.hdf5", **arrays), "toy", store).source_labels is None


def test_rewards_that_are_not_finite_cost_only_the_source_labels(store, write_hdf5, arrays):
    arrays["rewards"][12] = np.nan
    path = write_hdf5("a.hdf5", **arrays)
    result = ingest(path, "toy", store)
    assert result.source_labels is None
    (found,) = [f for f in result.findings if f.severity == "warning"]
    assert (found.episode, found.step) == (1, 2) and "without `source` labels" in found.message
    assert found in store.dataset("toy").manifest.findings
    assert ingest(path, "toy", store) == result
    clean = ingest(path, "clean", store, D4RL(not_finite="leave_out"))
    np.testing.assert_array_equal(store.labels(clean.dataset, clean.source_labels).rewards, arrays["rewards"][:10])


def test_source_labels_align_over_many_shards(store, hopper, monkeypatch):
    monkeypatch.setattr("data.store.SHARD_BYTES", 1 << 20)
    monkeypatch.setattr(Store.write_dataset, "__defaults__", ((), 1 << 20))
    result = ingest(hopper / "hopper-replay.hdf5", "hopper", store)
    assert len(store.dataset("hopper").manifest.shards) > 3
    with h5py.File(hopper / "hopper-replay.hdf5") as file:
        np.testing.assert_array_equal(
            np.asarray(store.labels(result.dataset, result.source_labels).rewards), file["rewards"][:]
        )


def test_progress_counts_every_step(store, write_hdf5, arrays):
    done: list[int] = []
    ingest(write_hdf5("a.hdf5", **arrays), "toy", store, progress=done.append)
    assert sum(done) == 20


@pytest.mark.parametrize(
    "bad",
    [
        {"actions": np.zeros((19, 2), np.float32)},
        {"observations": np.full((20, 3), np.nan, np.float32)},
        {"timeouts": np.roll(np.eye(1, 20, 9, dtype=bool)[0], 1)},
    ],
)
def test_a_refused_file_leaves_the_store_as_it_was(store, write_hdf5, arrays, bad):
    ingest(write_hdf5("good.hdf5", **arrays), "good", store)
    before = files(store)
    with pytest.raises(DatasetError, match=r"^bad\.hdf5: "):
        ingest(write_hdf5("bad.hdf5", **(arrays | bad)), "bad", store)
    assert files(store) == before and not list(store.root.glob("partial/*"))


INGEST = """
import sys
from pathlib import Path
from data.ingest import ingest
from data.store import Store
print(ingest(Path(sys.argv[1]), "toy", Store(Path(sys.argv[2]))).model_dump_json())
"""


def ingest_in_process(path: Path, store: Store) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", INGEST, str(path), str(store.root)]
    return subprocess.Popen(command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True)


def test_killed_anywhere_the_same_call_finishes(tmp_path, hopper):
    path = hopper / "hopper-replay.hdf5"
    process = ingest_in_process(path, Store(tmp_path / "whole"))
    whole, _ = process.communicate()
    store = Store(tmp_path / "store")
    for wait in ("partial/scratch-dataset-*", "partial/scratch-dataset-*/actions-*", "datasets/*/*", "labels/*/*"):
        process = ingest_in_process(path, store)
        while process.poll() is None and not list(store.root.glob(wait)):
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    process = ingest_in_process(path, store)
    again, _ = process.communicate()
    assert process.returncode == 0 and again == whole
    assert not list(store.root.glob("partial/*"))
    kept = sorted(p.relative_to(store.root) for p in store.root.rglob("*") if p.is_file() and "locks" not in p.parts)
    assert kept == sorted(
        p.relative_to(tmp_path / "whole")
        for p in (tmp_path / "whole").rglob("*")
        if p.is_file() and "locks" not in p.parts
    )


def test_two_processes_at_once_give_one_result(tmp_path, hopper):
    store = Store(tmp_path / "store")
    processes = [ingest_in_process(hopper / "hopper-expert.hdf5", store) for _ in range(2)]
    (one, _), (two, _) = [p.communicate() for p in processes]
    assert [p.returncode for p in processes] == [0, 0] and one == two
    assert len(store.datasets()) == 1 and not list(store.root.glob("partial/*"))
