"""What a store holds: datasets with their label sets, and runs."""

from __future__ import annotations

from pydantic import JsonValue
from rich.table import Table

from data.config import Config
from data.store import Store


class HeldLabels(Config):
    """A label set: what made it, and its returns, None where the labels are actions."""

    id: str
    labeler: str
    returns: dict[str, JsonValue] | None


class HeldDataset(Config):
    """A dataset and its label sets."""

    name: str
    digest: str
    n_episodes: int
    n_steps: int
    observation: tuple[int, ...]
    action: tuple[int, ...]
    labels: tuple[HeldLabels, ...]


class Inventory(Config):
    """All that a store holds."""

    store: str
    datasets: tuple[HeldDataset, ...]
    n_runs: int


def of_store(store: Store) -> Inventory:
    """List a store; whatever is damaged raises StoreError with its name."""
    datasets = []
    for stored in store.datasets():
        sets = store.label_sets(stored.digest)
        held = [HeldLabels(id=found.id, labeler=found.labeler, returns=found.manifest.returns) for found in sets]
        manifest = stored.manifest
        datasets.append(
            HeldDataset(
                name=stored.name,
                digest=stored.digest,
                n_episodes=manifest.n_episodes,
                n_steps=manifest.n_steps,
                observation=manifest.observation.shape,
                action=manifest.action.shape,
                labels=tuple(held),
            )
        )
    n_runs = len(list((store.root / "runs").glob("*/manifest.json")))
    return Inventory(store=str(store.root), datasets=tuple(datasets), n_runs=n_runs)


def tables(inventory: Inventory) -> list[Table | str]:
    """What to print: a table of each dataset's label sets."""
    if not inventory.datasets:
        return [f"the store {inventory.store} is empty."]
    shown: list[Table | str] = []
    for dataset in inventory.datasets:
        table = Table(
            title=f"{dataset.name} {dataset.digest}\n{dataset.n_episodes:,} episodes, {dataset.n_steps:,} steps, "
            f"observations {dataset.observation}, actions {dataset.action}",
            title_justify="left",
            box=None,
            pad_edge=False,
            padding=(0, 1),
        )
        for title in ("labels", "id", "mean return", "lowest", "highest"):
            table.add_column(title, justify="left" if title in ("labels", "id") else "right", overflow="fold")
        for labels in dataset.labels:
            if labels.returns is None:
                table.add_row(labels.labeler, labels.id[:12], "actions", "", "")
                continue
            numbers = [labels.returns[name] for name in ("mean", "minimum", "maximum")]
            table.add_row(labels.labeler, labels.id[:12], *(f"{float(str(n)):,.2f}" for n in numbers))
        shown.append(table)
    shown.append(f"{inventory.n_runs} runs")
    return shown
