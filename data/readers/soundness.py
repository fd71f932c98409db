"""Soundness: what every reader's episodes must be before they are stored, checked once for all formats."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from data.errors import DatasetError
from data.findings import Finding, Severity
from data.readers.reader import Block, Reader, Refused, Source
from data.trajectories import Trajectories

PLACES = 5
"""So many places of a kind are named; the rest is counted."""

ROUNDING = 1e-6
"""Actions beyond a bound by this part of the larger bound are rounding (8 float32 steps)."""


def sound_blocks(source: Source, reader: Reader, path: Path) -> Iterator[Block]:
    """The blocks of a source, finite and within their bounds.

    NaN and infinity among observations and actions, and actions beyond their bounds, refuse the file after all of it
    was read, naming the first places; by setting, such episodes are left out, or actions are clipped, and counted.
    Episodes and steps are named as the source counts them, before any is left out.
    """
    first_episode = 0
    bad: dict[str, list[tuple[int, int, str]]] = {}
    counts: dict[str, int] = {}
    left_out = left_out_steps = kept = 0
    for block in source.blocks():
        trajectories = block.trajectories
        wrong = _not_finite(block, reader.not_finite == "leave_out")
        spoiled = np.zeros(trajectories.n_episodes, bool)
        for key, places in wrong.items():
            counts[key] = counts.get(key, 0) + len(places)
            known = bad.setdefault(key, [])
            known += [(first_episode + e, t, v) for e, t, v in places[: PLACES - len(known)]]
            spoiled[[e for e, _, _ in places]] = True
        first_episode += trajectories.n_episodes
        if reader.not_finite == "refuse" or not spoiled.any():
            kept += trajectories.n_episodes
            yield block
            continue
        left_out += int(spoiled.sum())
        left_out_steps += int(trajectories.lengths[spoiled].sum())
        good = np.flatnonzero(~spoiled)
        if len(good):
            kept += len(good)
            rewards = None if block.rewards is None else block.rewards[~spoiled[trajectories.episode_index]]
            yield replace(block, trajectories=trajectories.select(good), rewards=rewards)
    for key, places in bad.items():
        where = "; ".join(f"episode {e}, step {t} ({v})" for e, t, v in places)
        more = f" and {counts[key] - len(places):,} more" if counts[key] > len(places) else ""
        source.findings.append(
            Finding(
                code="not-finite",
                severity=Severity.ERROR if reader.not_finite == "refuse" else Severity.WARNING,
                message=f"'{key}' is not finite at {where}{more}.",
                episode=places[0][0],
                step=places[0][1],
                count=counts[key],
            )
        )
    if bad and reader.not_finite == "refuse":
        raise Refused(
            path,
            Finding(
                code="not-finite",
                severity=Severity.ERROR,
                message=" ".join(f.message for f in source.findings if f.code == "not-finite")
                + " Repair the file, or leave such episodes out with the reader setting not_finite: leave_out.",
            ),
        )
    if left_out:
        source.findings.append(
            Finding(
                code="episodes-left-out",
                severity=Severity.WARNING,
                message=f"{left_out:,} episodes with {left_out_steps:,} steps hold numbers that are not finite and "
                "were left out, as asked.",
                count=left_out,
            )
        )
    if not kept:
        raise DatasetError(f"{path.name}: no steps: there is not one episode to store.")


def _not_finite(block: Block, rewards_too: bool) -> dict[str, list[tuple[int, int, str]]]:
    """By key, the (episode, step, value) of steps that are not finite; a final observation counts as step `length`."""
    trajectories = block.trajectories
    wrong = {
        "observations": _places(np.asarray(trajectories.observations), trajectories.offsets, trajectories, final=True),
        "actions": _places(np.asarray(trajectories.actions), trajectories.offsets, trajectories, final=False),
    }
    if rewards_too and block.rewards is not None:
        wrong["rewards"] = _places(block.rewards, trajectories.offsets, trajectories, final=False)
    return {key: places for key, places in wrong.items() if places}


def _places(
    rows: np.ndarray, offsets: np.ndarray, trajectories: Trajectories, final: bool
) -> list[tuple[int, int, str]]:
    if rows.dtype.kind != "f" or np.isfinite(rows).all():
        return []
    starts = offsets[:-1] + (np.arange(trajectories.n_episodes) if final else 0)
    flat = rows.reshape(len(rows), -1)
    index = np.flatnonzero(~np.isfinite(flat).all(1))
    episodes = np.searchsorted(starts, index, side="right") - 1
    values = [str(flat[i][~np.isfinite(flat[i])][0]) for i in index]
    return [(int(e), int(i - starts[e]), v) for i, e, v in zip(index, episodes, values, strict=True)]
