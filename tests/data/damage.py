"""Damaged files: made from a seed, and what ingestion makes of each; runs in processes that may die."""

from __future__ import annotations

import tempfile
import traceback
import warnings
from pathlib import Path

import h5py
import numpy as np

from data.errors import AssayError
from data.ingest import ingest
from data.store import Store
from tests.data.readers.samples import SAMPLES, recording


def outcome(seed: int) -> str:
    """`read`, `refused`, or `WRONG: ...` with what went wrong, for the damaged file of one seed."""
    with tempfile.TemporaryDirectory() as folder:
        return _outcome(seed, Path(folder))


def _outcome(seed: int, folder: Path) -> str:
    rng = np.random.default_rng(seed)
    sample = SAMPLES[int(rng.integers(len(SAMPLES)))]
    path = sample.write(folder, recording())
    said = f"seed {seed}, {sample.name}, {_damage(path, rng)}"
    store = Store(folder / "store")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            done = ingest(path, "damaged", store, sample.reader)
    except AssayError as error:
        kept = ("datasets/*/*", "labels/*/*", "ingests/*", "partial/*")
        if left := [place for pattern in kept for place in store.root.glob(pattern)]:
            return f"WRONG: {said}: refused, and {left[0]} is left behind"
        message = str(error)
        if not any(place.name in message for place in (path, *path.rglob("*"))):
            return f"WRONG: {said}: the message names no file: {message}"
        return "refused"
    except BaseException:
        return f"WRONG: {said}: {traceback.format_exc(limit=-3)}"
    stored = store.dataset("damaged", done.dataset)
    data = stored.trajectories()
    observations, actions = np.asarray(data.observations), np.asarray(data.actions)
    steps = data.observation_rows(np.arange(data.n_steps))
    if data.digest() != done.dataset:
        return f"WRONG: {said}: what is stored is not what its digest says"
    if not (np.isfinite(observations).all() and np.isfinite(actions).all()):
        return f"WRONG: {said}: numbers that are not finite were stored"
    if sample.name == "d4rl" and not _is_what_h5py_reads(path, observations[steps], actions):
        return f"WRONG: {said}: not what the file holds"
    return "read"


def _is_what_h5py_reads(path: Path, observations: np.ndarray, actions: np.ndarray) -> bool:
    """Whether these are the first rows of the file: an unfinished last step may be left out."""
    with h5py.File(path) as file:
        for key, ours in (("observations", observations), ("actions", actions)):
            theirs = file[key][...].astype(np.float32).reshape(len(file[key]), -1)[: len(ours)]
            if theirs.tobytes() != ours.astype(np.float32).reshape(len(ours), -1).tobytes():
                return False
    return True


def _damage(path: Path, rng: np.random.Generator) -> str:
    """Do something to one file. Returns what, in words."""
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    file = files[int(rng.integers(len(files)))]
    kinds = [_flip_bits, _truncate, _overwrite]
    if h5py.is_hdf5(file):
        kinds += [_swap_keys, _change_dtype, _drop_key, _shorten]
    kind = kinds[int(rng.integers(len(kinds)))]
    kind(file, rng)
    return f"{kind.__name__.strip('_')} in {file.name}"


def _flip_bits(file: Path, rng: np.random.Generator) -> None:
    content = np.frombuffer(file.read_bytes(), np.uint8).copy()
    for _ in range(int(rng.integers(1, 9))):
        content[rng.integers(len(content))] ^= np.uint8(1 << rng.integers(8))
    file.write_bytes(content.tobytes())


def _truncate(file: Path, rng: np.random.Generator) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: int(rng.integers(len(content)))])


def _overwrite(file: Path, rng: np.random.Generator) -> None:
    content = np.frombuffer(file.read_bytes(), np.uint8).copy()
    start = int(rng.integers(len(content)))
    stop = min(len(content), start + int(rng.integers(1, 600)))
    content[start:stop] = 0 if rng.random() < 0.5 else rng.integers(256, size=stop - start)
    file.write_bytes(content.tobytes())


def _arrays(file: h5py.File) -> list[str]:
    found: list[str] = []
    file.visititems(lambda name, item: found.append(name) if isinstance(item, h5py.Dataset) else None)
    return sorted(found)


def _swap_keys(path: Path, rng: np.random.Generator) -> None:
    with h5py.File(path, "r+") as file:
        one, other = rng.choice(_arrays(file), 2, replace=False)
        file.move(one, "aside")
        file.move(other, one)
        file.move("aside", other)


def _change_dtype(path: Path, rng: np.random.Generator) -> None:
    with h5py.File(path, "r+") as file:
        key = str(rng.choice(_arrays(file)))
        values = file[key][...]
        attributes = dict(file[key].attrs)
        del file[key]
        dtype = str(rng.choice(["S8", "i1", "u2", "f2", ">f8", "c8", "bool"]))
        try:
            file[key] = values.astype(dtype)
        except (TypeError, ValueError):
            file[key] = np.zeros(values.shape, "S3")
        file[key].attrs.update(attributes)


def _drop_key(path: Path, rng: np.random.Generator) -> None:
    with h5py.File(path, "r+") as file:
        del file[str(rng.choice(_arrays(file)))]


def _shorten(path: Path, rng: np.random.Generator) -> None:
    with h5py.File(path, "r+") as file:
        key = str(rng.choice(_arrays(file)))
        values = file[key][...]
        del file[key]
        file[key] = values[:-1] if values.ndim else np.zeros(3)


def run(seeds: range, folder: Path) -> None:
    """Write the outcome of each seed into `folder` as soon as it is known, for a parent that watches."""
    for seed in seeds:
        (folder / f"{seed}.started").touch()
        (folder / f"{seed}.txt").write_text(outcome(seed), encoding="utf-8")


if __name__ == "__main__":
    import sys

    run(range(int(sys.argv[1]), int(sys.argv[2])), Path(sys.argv[3]))
