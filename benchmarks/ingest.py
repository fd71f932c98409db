"""Ingestion against h5py's bare read, loading against minari's and d3rlpy's loaders, and memory against size.

    python benchmarks/ingest.py [--steps 300000] [--rounds 3]     # gzip D4RL: ingest and bare read in turns; loaders
    python benchmarks/ingest.py --gib 10                          # memory of ingestion, first batch of what is stored

A file has the sizes of D4RL's halfcheetah: 17 observations, 6 actions, next observations. Minari and d3rlpy are left
out, aloud, where they are not installed. Everything is written under a temporary folder, which is removed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import h5py
import numpy as np

from data.export import export
from data.ingest import ingest
from data.readers.reader import Block
from data.store import Store
from data.trajectories import Trajectories
from data.writers.minari import MinariWriter

WIDTH, N_ACTIONS, EPISODE = 17, 6, 1000
BATCH = 256
GIB = 1 << 30


def write_d4rl(path: Path, n_steps: int, compression: str | None) -> None:
    """Smooth walks, so that gzip has as much to do as with real trajectories."""
    rng = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        settings = {"compression": compression, "chunks": True}
        shapes = {"observations": (WIDTH,), "next_observations": (WIDTH,), "actions": (N_ACTIONS,), "rewards": ()}
        for key, shape in shapes.items():
            file.create_dataset(key, (n_steps, *shape), "f4", **settings)
        for key in ("terminals", "timeouts"):
            file.create_dataset(key, (n_steps,), "?", **settings)
        for start in range(0, n_steps, 100 * EPISODE):
            stop = min(start + 100 * EPISODE, n_steps)
            walk = np.cumsum(rng.normal(size=(stop - start + 1, WIDTH)).astype(np.float32) * 0.1, 0)
            rows = slice(start, stop)
            file["observations"][rows], file["next_observations"][rows] = walk[:-1], walk[1:]
            file["actions"][rows] = rng.uniform(-1, 1, (stop - start, N_ACTIONS))
            file["rewards"][rows] = rng.normal(size=stop - start)
            file["terminals"][rows] = False
            file["timeouts"][rows] = np.arange(start, stop) % EPISODE == EPISODE - 1


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def bare_read(path: Path) -> None:
    """Every value of the file in memory, a chunk's worth of rows at a time, as a careful reader would."""
    with h5py.File(path) as file:
        for key in file:
            for start in range(0, len(file[key]), 1 << 16):
                file[key][start : start + (1 << 16)]


def first_batch(store: Path, name: str) -> None:
    """Open a stored dataset and draw a batch of transitions."""
    data = Store(store).dataset(name).trajectories()
    steps = np.random.default_rng(0).integers(data.n_steps, size=BATCH)
    rows = data.observation_rows(steps)
    assert data.observations[rows].shape == data.observations[rows + 1].shape
    assert len(data.actions[steps]) == BATCH


def compare(folder: Path, n_steps: int, rounds: int) -> None:
    path = folder / "walks.hdf5"
    write_d4rl(path, n_steps, "gzip")
    print(f"{os.cpu_count()} cores; {n_steps:,} steps, {path.stat().st_size / 2**20:.0f} MiB of gzip HDF5")
    seconds: dict[str, list[float]] = {"h5py, bare read": [], "assay, ingest": []}
    for round_ in range(rounds):
        seconds["h5py, bare read"].append(timed(lambda: bare_read(path)))
        store = Store(folder / f"store-{round_}")
        seconds["assay, ingest"].append(timed(lambda store=store: ingest(path, "walks", store)))
    base = statistics.median(seconds["h5py, bare read"])
    for name, values in seconds.items():
        ratios = statistics.median(a / b for a, b in zip(values, seconds["h5py, bare read"], strict=True))
        print(f"  {name:20} {statistics.median(values):7.2f} s   x{ratios:.2f}")
    assert base > 0

    loads: dict[str, Callable[[], object]] = {
        "assay, first batch": lambda: first_batch(folder / "store-0", "walks"),
        **minari_loader(folder),
        **d3rlpy_loader(folder, path),
    }
    print("from opening to the first batch")
    found = {name: [timed(load) for _ in range(rounds)] for name, load in loads.items()}
    for name, values in found.items():
        print(f"  {name:44} {statistics.median(values):8.4f} s")


def minari_loader(folder: Path) -> dict[str, Callable[[], object]]:
    if importlib.util.find_spec("minari") is None:
        print("minari is not installed: left out")
        return {}
    root = folder / "minari"
    stored = Store(folder / "store-0").dataset("walks")
    export(stored, root / "walks-v0", MinariWriter())
    os.environ["MINARI_DATASETS_PATH"] = str(root)
    import minari

    def sample() -> object:
        return minari.load_dataset("walks-v0").sample_episodes(1)

    def everything() -> object:
        return [episode.observations.sum() for episode in minari.load_dataset("walks-v0").iterate_episodes()]

    return {"minari, one episode": sample, "minari, all episodes, for uniform batches": everything}


def d3rlpy_loader(folder: Path, path: Path) -> dict[str, Callable[[], object]]:
    if importlib.util.find_spec("d3rlpy") is None:
        print("d3rlpy is not installed: left out")
        return {}
    import d3rlpy

    with h5py.File(path) as file:
        episodes = [file[key][...] for key in ("observations", "actions", "rewards", "terminals", "timeouts")]
    dump = folder / "dump.h5"
    with dump.open("w+b") as stream:
        d3rlpy.dataset.MDPDataset(*episodes).dump(stream)

    def load() -> object:
        with dump.open("rb") as stream:
            buffer = d3rlpy.dataset.ReplayBuffer.load(stream, d3rlpy.dataset.InfiniteBuffer())
        return buffer.sample_transition_batch(BATCH)

    return {"d3rlpy, ReplayBuffer.load": load}


def blocks(n_bytes: int) -> Iterator[Block]:
    """Whole episodes of noise, of about so many bytes in all."""
    rng = np.random.default_rng(0)
    n_episodes = 100
    n = n_episodes * EPISODE
    for _ in range(-(-n_bytes // (n * (WIDTH + N_ACTIONS) * 4))):
        ends = np.zeros(n_episodes, bool)
        yield Block(
            Trajectories(
                observations=rng.random((n + n_episodes, WIDTH), np.float32),
                actions=rng.random((n, N_ACTIONS), np.float32),
                offsets=np.arange(n_episodes + 1) * EPISODE,
                terminated=ends,
                truncated=~ends,
                final_observed=~ends,
            ),
            None,
        )


def large(folder: Path, gib: float) -> None:
    """Ingestion and first batch in processes of their own, so that what is measured is theirs alone."""
    row = (2 * WIDTH + N_ACTIONS + 1) * 4 + 2
    path = folder / "walks.hdf5"
    write_d4rl(path, int(gib * GIB) // row, None)
    print(f"source of {path.stat().st_size / GIB:.2f} GiB")
    found = in_a_process("ingested", path, folder / "store")
    print(f"  ingested in {found['seconds']:.0f} s, peak resident memory {found['gib']:.2f} GiB")
    path.unlink()
    Store(folder / "large").write_dataset("walks", blocks(int(gib * GIB)), None)
    Store(folder / "small").write_dataset("walks", blocks(1), None)
    for attempt in ("first", "second"):
        found = in_a_process("batched", folder / "large", folder / "small")
        print(f"  {attempt} process: batch of a {gib:g} GiB dataset {found['seconds']:.3f} s after opening it")


def in_a_process(what: str, path: Path, store: Path) -> dict[str, float]:
    command = [sys.executable, __file__, "--inside", what, str(path), str(store)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    said: dict[str, float] = json.loads(done.stdout)
    return said


def inside(what: str, path: Path, store: Path) -> None:
    if what == "ingested":
        seconds = timed(lambda: ingest(path, "walks", Store(store)))
    else:
        first_batch(store, "walks")  # libraries are loaded
        seconds = timed(lambda: first_batch(path, "walks"))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
    print(json.dumps({"seconds": seconds, "gib": peak}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gib", type=float, help="size of a large source, instead of the comparison")
    parser.add_argument("--inside", nargs=3, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.inside:
        inside(chosen.inside[0], Path(chosen.inside[1]), Path(chosen.inside[2]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            if chosen.gib:
                large(Path(temporary), chosen.gib)
            else:
                compare(Path(temporary), chosen.steps, chosen.rounds)
