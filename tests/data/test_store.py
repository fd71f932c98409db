"""The store: what is read back is what was written, whole or not at all, once, whoever asks and whatever is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data import columns
from data.errors import DatasetError, StoreError
from data.findings import Finding, Severity
from data.labels import Labels
from data.readers.reader import Block
from data.store import Store
from data.trajectories import Sharded, Trajectories, concatenate


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def stored(store: Store, data: Trajectories, name: str = "toy", shard_bytes: int = 200):
    return store.write_dataset(name, [Block(data, None)], {"file": "toy"}, shard_bytes=shard_bytes)


def equal(a: Trajectories, b: Trajectories) -> None:
    for name in ("observations", "actions", "offsets", "terminated", "truncated", "final_observed"):
        np.testing.assert_array_equal(np.asarray(getattr(a, name)), np.asarray(getattr(b, name)))
    assert (a.n_actions, a.action_bounds) == (b.n_actions, b.action_bounds)


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectories:
    """Any sequence of episodes: vectors, images or scalars, continuous, discrete or multi-discrete actions."""
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=10))
    shape = draw(st.sampled_from([(), (1,), (3,), (2, 2, 3)]))
    dtype = draw(st.sampled_from(["f4", "f8", "f2", "u1", "i8"]))
    n_actions = draw(st.sampled_from([None, (4,), (2, 3)]))
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    n, e = sum(lengths), len(lengths)
    if n_actions is None:
        actions = rng.normal(size=(n, 2)).astype(np.float32)
    else:
        actions = rng.integers(0, 2, (n, len(n_actions)))
        actions = actions[:, 0] if len(n_actions) == 1 else actions
    terminated = rng.random(e) < 0.5
    return Trajectories(
        observations=(rng.random((n + e, *shape)) * 200).astype(dtype),
        actions=actions,
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        terminated=terminated,
        truncated=~terminated | (rng.random(e) < 0.5),
        final_observed=rng.random(e) < 0.5,
        n_actions=n_actions,
        action_bounds=draw(st.sampled_from([None, (-1.0, 1.0)])) if n_actions is None else None,
    )


# ---------------------------------------------------------------- datasets


@given(trajectories(), st.integers(1, 2000), st.integers(1, 4))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_episodes_in_any_shards_come_back_equal_with_the_same_digest(tmp_path, data, shard_bytes, n_blocks):
    store = Store(tmp_path)
    blocks = [
        Block(data.select(part), None) for part in np.array_split(np.arange(data.n_episodes), n_blocks) if len(part)
    ]
    dataset = store.write_dataset("any", blocks, {}, shard_bytes=shard_bytes)
    assert dataset.digest == data.digest()
    equal(dataset.trajectories(), data)
    equal(concatenate(dataset.shards()), data)
    assert [s.n_steps for s in dataset.shards()] == [s.stop - s.start for s in dataset.shard_steps()]


def test_shards_hold_whole_episodes_and_keep_to_their_size(store, random_trajectories):
    # A step holds 12 bytes of observation and 8 of action, an episode 12 more: 112, 32 and 152 bytes.
    data = random_trajectories((5, 1, 7, 5, 1, 7))
    dataset = stored(store, data, shard_bytes=200)
    assert [s.n_episodes for s in dataset.manifest.shards] == [2, 1, 2, 1]
    one_big = stored(store, data, "big", shard_bytes=1)
    assert [s.n_episodes for s in one_big.manifest.shards] == [1] * 6
    assert one_big.digest == dataset.digest


def test_columns_are_mapped_without_a_copy(store, random_trajectories):
    dataset = stored(store, random_trajectories((5, 1, 7)), shard_bytes=1 << 20)
    before = pa.total_allocated_bytes()
    data = dataset.trajectories()
    assert isinstance(data.observations, np.ndarray) and not data.observations.flags.owndata
    assert not data.observations.flags.writeable and pa.total_allocated_bytes() == before
    assert isinstance(stored(store, random_trajectories((5, 1, 7)), "two").trajectories().observations, Sharded)


def test_the_manifest_says_what_it_is_and_where_it_came_from(store, random_trajectories):
    data = replace(random_trajectories((5, 1, 7)), final_observed=np.array([True, True, False]))
    finding = Finding(code="said", severity=Severity.NOTE, message="noticed late")
    findings: list[Finding] = []

    def blocks():
        yield Block(data, np.zeros(13, np.float32))
        findings.append(finding)

    manifest = store.write_dataset("toy", blocks(), {"file": "a.hdf5"}, findings).manifest
    assert (manifest.n_episodes, manifest.n_steps, manifest.n_unobserved) == (3, 13, 1)
    assert (manifest.n_terminated, manifest.n_truncated) == (2, 1)
    assert (manifest.lengths.minimum, manifest.lengths.maximum, manifest.lengths.median) == (1, 7, 5)
    assert manifest.provenance == {"file": "a.hdf5"} and manifest.findings == (finding,)
    assert manifest.observation.shape == (3,) and manifest.observation.dtype == "float32"


def test_statistics_are_of_the_observations_at_steps(store, random_trajectories):
    data = random_trajectories((5, 1, 7))
    dataset = stored(store, data)
    np.testing.assert_allclose(
        dataset.statistics("observations").mean, data.step_observations.mean(0, dtype=np.float64)
    )
    np.testing.assert_allclose(dataset.statistics("actions").std, data.actions.std(0, dtype=np.float64))
    assert dataset.statistics("actions").count == 13


def test_the_same_content_is_stored_once(store, random_trajectories):
    first = stored(store, random_trajectories())
    times = {p: p.stat().st_mtime_ns for p in first.path.iterdir()}
    assert stored(store, random_trajectories()).path == first.path
    assert {p: p.stat().st_mtime_ns for p in first.path.iterdir()} == times


def test_several_datasets_of_one_name_are_told_apart_by_digest(store, random_trajectories):
    one, two = stored(store, random_trajectories(seed=1)), stored(store, random_trajectories(seed=2))
    assert store.dataset("toy", two.digest).digest == two.digest
    with pytest.raises(StoreError, match=f"(?s){min(one.digest, two.digest)}.*{max(one.digest, two.digest)}"):
        store.dataset("toy")
    assert {d.digest for d in store.datasets()} == {one.digest, two.digest}


def test_what_is_not_there_is_named(store, random_trajectories):
    stored(store, random_trajectories())
    with pytest.raises(StoreError, match="no dataset 'other'; it has: toy"):
        store.dataset("other")
    with pytest.raises(StoreError, match="no labels abc"):
        store.labels("d", "abc")
    with pytest.raises(StoreError, match="no run abc"):
        store.run("abc")


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "a b", "x" * 101])
def test_names_that_could_leave_the_store_are_refused(store, random_trajectories, name):
    with pytest.raises(StoreError, match="cannot name a dataset"):
        stored(store, random_trajectories(), name)
    assert not store.root.exists()


def test_no_episodes_are_refused(store):
    with pytest.raises(DatasetError, match="nothing to store"):
        store.write_dataset("none", [], {})


def test_a_source_that_fails_half_way_leaves_nothing(store, random_trajectories):
    def blocks():
        yield Block(random_trajectories(), None)
        raise DatasetError("damaged")

    with pytest.raises(DatasetError, match="damaged"):
        store.write_dataset("toy", blocks(), {}, shard_bytes=1)
    assert not list(store.root.glob("datasets/*")) and not list(store.root.glob("partial/*"))


def test_episodes_that_differ_in_kind_are_refused(store, random_trajectories):
    blocks = [Block(random_trajectories(width=3), None), Block(random_trajectories(width=4), None)]
    with pytest.raises(DatasetError, match="'observations' are float32"):
        store.write_dataset("toy", blocks, {})


@pytest.mark.parametrize("file", ["observations-00001.arrow", "episodes.arrow", "manifest.json"])
def test_a_file_that_is_cut_is_refused_by_name(store, random_trajectories, file):
    dataset = stored(store, random_trajectories())
    path = dataset.path / file
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(StoreError, match=file):
        store.dataset("toy")


def test_a_missing_shard_is_refused_by_name(store, random_trajectories):
    dataset = stored(store, random_trajectories())
    (dataset.path / "actions-00000.arrow").unlink()
    with pytest.raises(StoreError, match=r"actions-00000\.arrow is missing"):
        store.dataset("toy")


def test_a_manifest_of_another_version_is_refused(store, random_trajectories):
    path = stored(store, random_trajectories()).path / "manifest.json"
    path.write_text(path.read_text().replace("assay-dataset/1", "assay-dataset/9"))
    with pytest.raises(StoreError, match="assay-dataset/9"):
        store.dataset("toy")


@pytest.mark.parametrize("content", [b"", b"ARROW1", b"x" * 500])
def test_a_half_written_column_is_refused_by_name(tmp_path, content):
    path = tmp_path / "rewards.arrow"
    columns.write(path, [np.zeros(100, np.float32)])
    whole = path.read_bytes()
    for bad in (content, whole[: len(whole) // 2], whole[:-8]):
        path.write_bytes(bad)
        with pytest.raises(StoreError, match=r"rewards\.arrow is not a whole"):
            columns.read(path)
        with pytest.raises(StoreError, match=r"rewards\.arrow is not a whole"):
            columns.read_table(path)


# ---------------------------------------------------------------- labels


def by_position(index: int, shard: Trajectories, steps: slice) -> Labels:
    rewards = np.arange(steps.start, steps.stop, dtype=np.float32)
    return Labels(rewards, pl.DataFrame({"shard": [index] * shard.n_episodes}))


def test_labels_align_with_steps_and_diagnostics_with_episodes(store, random_trajectories):
    dataset = stored(store, random_trajectories((5, 1, 7)))
    labels = store.write_labels(dataset, "l", by_position, {"kind": "position"})
    assert np.asarray(labels.rewards).tolist() == list(range(13))
    assert labels.diagnostics["shard"].to_list() == [0, 0, 1]
    assert labels.manifest.rewards["sum"] == 78 and labels.manifest.origin == {"kind": "position"}
    assert labels.manifest.returns["maximum"] == 6 + 7 + 8 + 9 + 10 + 11 + 12
    assert store.labels(dataset.digest, "l").rewards.dtype == np.float32


def test_labels_are_made_once(store, random_trajectories):
    dataset = stored(store, random_trajectories())
    store.write_labels(dataset, "l", by_position, {})

    def never(*_: object) -> Labels:
        raise AssertionError("labelled again")

    assert store.has_labels(dataset.digest, "l")
    store.write_labels(dataset, "l", never, {})


def test_labels_that_are_not_finite_or_not_enough_are_refused_and_not_stored(store, random_trajectories):
    dataset = stored(store, random_trajectories())
    for rewards, message in ((np.full(6, np.nan, np.float32), "label nan"), (np.zeros(5, np.float32), "5 labels")):
        with pytest.raises(DatasetError, match=message):
            store.write_labels(dataset, "l", lambda *_, r=rewards: Labels(r), {})
    assert not store.has_labels(dataset.digest, "l") and not list(store.root.glob("labels/*/*"))


def test_labels_belong_to_one_dataset(store, random_trajectories):
    one, two = stored(store, random_trajectories(seed=1)), stored(store, random_trajectories(seed=2), "two")
    labels = store.write_labels(one, "l", by_position, {})
    assert not store.has_labels(two.digest, "l")
    moved = store.root / "labels" / two.digest / "l"
    moved.parent.mkdir(parents=True)
    labels.path.rename(moved)
    with pytest.raises(StoreError, match=f"for dataset {one.digest}, not {two.digest}"):
        store.labels(two.digest, "l")


def test_a_cut_label_file_is_refused_by_name(store, random_trajectories):
    dataset = stored(store, random_trajectories())
    path = store.write_labels(dataset, "l", by_position, {}).path / "rewards-00001.arrow"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(StoreError, match=r"rewards-00001\.arrow has"):
        store.labels(dataset.digest, "l")


def test_a_failed_shard_leaves_the_finished_ones_for_the_next_try(store, random_trajectories):
    dataset = stored(store, random_trajectories((5, 1, 7, 5, 1, 7)))
    made: list[int] = []

    def make(index: int, shard: Trajectories, steps: slice) -> Labels:
        made.append(index)
        if made == [0, 1, 2]:
            raise RuntimeError("out of memory")
        return by_position(index, shard, steps)

    with pytest.raises(RuntimeError):
        store.write_labels(dataset, "l", make, {})
    assert not store.has_labels(dataset.digest, "l")
    labels = store.write_labels(dataset, "l", make, {})
    assert made == [0, 1, 2, 2, 3] and np.asarray(labels.rewards).tolist() == list(range(26))


# ---------------------------------------------------------------- runs and records


def test_a_run_appears_whole_and_once(store):
    calls = []

    def fill(folder: Path) -> None:
        calls.append(folder)
        (folder / "policy").write_text("weights")

    def broken(folder: Path) -> None:
        (folder / "policy").write_text("half")
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError):
        store.write_run("r", broken)
    assert not store.has_run("r") and not list(store.root.glob("partial/*"))
    assert store.write_run("r", fill) == store.write_run("r", fill) == store.run("r")
    assert len(calls) == 1 and (store.run("r") / "policy").read_text() == "weights"


def test_scratch_of_a_dead_process_is_cleared_and_that_of_a_living_one_is_not(store):
    with store.scratch("mine") as mine:
        left = mine.parent / "scratch-left-by-another"
        left.mkdir()
        with store.scratch("next"):
            assert mine.exists() and not left.exists()
    assert not mine.exists()


def test_a_lock_is_held_against_other_threads(store):
    order: list[str] = []

    def second() -> None:
        with store.lock("k"):
            order.append("second")

    with store.lock("k"):
        thread = threading.Thread(target=second)
        thread.start()
        time.sleep(0.1)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


# ---------------------------------------------------------------- kills and rivals

LABEL = """
import sys, time
from pathlib import Path
import numpy as np
from data.labels import Labels
from data.store import Store

store = Store(Path(sys.argv[1]))
dataset = store.dataset("toy")

def make(index, shard, steps):
    with (store.root.parent / "made").open("a") as file:
        file.write(f"{index}\\n")
    time.sleep(float(sys.argv[2]))
    rng = np.random.default_rng(index)
    return Labels(rng.normal(size=shard.n_steps).astype(np.float32))

store.write_labels(dataset, "l", make, {})
"""


def label_in_process(store: Store, seconds: float) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", LABEL, str(store.root), str(seconds)], cwd=Path(__file__).parents[2])


def content(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def shards_made(store: Store) -> list[int]:
    path = store.root.parent / "made"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def test_killed_labelling_goes_on_where_it_stopped_with_the_same_bits(tmp_path, random_trajectories):
    data = random_trajectories((5, 1, 7) * 4)
    reference, store = Store(tmp_path / "a" / "store"), Store(tmp_path / "b" / "store")
    for each in (reference, store):
        dataset = stored(each, data)
    n_shards = len(dataset.manifest.shards)
    assert label_in_process(reference, 0).wait() == 0

    process = label_in_process(store, 0.2)
    while len(shards_made(store)) < 4:
        time.sleep(0.01)
        assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not store.has_labels(dataset.digest, "l")
    finished = len(list(store.root.glob("partial/labels-*/rewards-*.arrow")))
    assert 3 <= finished < n_shards
    (store.root.parent / "made").unlink()

    assert label_in_process(store, 0).wait() == 0
    assert shards_made(store) == list(range(finished, n_shards))
    assert content(store.labels(dataset.digest, "l").path) == content(reference.labels(dataset.digest, "l").path)
    assert not list(store.root.glob("partial/*"))

    (store.root.parent / "made").unlink()
    assert label_in_process(store, 0).wait() == 0
    assert shards_made(store) == []


def test_two_processes_at_once_share_one_result(tmp_path, random_trajectories):
    store = Store(tmp_path / "store")
    dataset = stored(store, random_trajectories((5, 1, 7) * 2))
    processes = [label_in_process(store, 0.05) for _ in range(2)]
    assert [p.wait() for p in processes] == [0, 0]
    assert shards_made(store) == list(range(len(dataset.manifest.shards)))


def test_a_reader_never_sees_a_label_set_that_is_not_whole(tmp_path, random_trajectories):
    store = Store(tmp_path / "store")
    dataset = stored(store, random_trajectories((5, 1, 7) * 2))
    process = label_in_process(store, 0.02)
    while process.poll() is None:
        for path in store.root.glob("labels/*/*"):
            manifest = json.loads((path / "manifest.json").read_text())
            assert all((path / name).stat().st_size == n for s in manifest["shards"] for name, n in s["files"].items())
        os.sched_yield()
    assert len(store.labels(dataset.digest, "l").rewards) == 26
