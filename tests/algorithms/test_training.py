import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import polars as pl
import pytest
import torch
from pydantic import PrivateAttr
from torch import Tensor

from algorithms import BC, IQL
from algorithms.algorithm import Batch
from algorithms.bc import BCState
from algorithms.policy import Policy, load_policy
from algorithms.spec import Spec
from algorithms.training import Member, Training, checkpoint_members, settled, train
from data.errors import ConfigurationError, DatasetError, StoreError, WorkError
from data.trajectories import Trajectories

Make = Callable[..., Trajectories]
CPU = torch.device("cpu")


class Recorder(BC):
    """Learns as BC does and keeps every batch."""

    kind: Literal["bc"] = "bc"
    hidden: tuple[int, ...] = (4,)
    _batches: list[Batch] = PrivateAttr(default_factory=list)

    def update(self, state: BCState, batch: Batch) -> dict[str, Tensor]:
        self._batches.append(batch)
        return super().update(state, batch)

    def column(self, name: str, member: int) -> Tensor:
        return torch.cat([getattr(batch, name)[member] for batch in self._batches])


class Diverging(BC):
    """Reports a loss that is not a number for the second member at the seventh step."""

    kind: Literal["bc"] = "bc"
    hidden: tuple[int, ...] = (4,)

    def update(self, state: BCState, batch: Batch) -> dict[str, Tensor]:
        metrics = super().update(state, batch)
        if state.optimiser.n_steps == 7:
            metrics["actor_loss"][1] = torch.nan
        return metrics


def member(data: Trajectories, seed: int = 0, run_id: str = "run", rewards: np.ndarray | None = None) -> Member:
    return Member(run_id, np.arange(data.n_steps, dtype=np.float32) if rewards is None else rewards, seed)


def recorded(data: Trajectories, members: Sequence[Member], steps: int = 40) -> Recorder:
    recorder = Recorder()
    train(recorder, data, members, Training(steps=steps, batch_size=8), device=CPU)
    return recorder


def test_every_transition_has_its_own_observations_action_and_end(make: Make) -> None:
    data = make()  # episodes end at steps 4 (terminated), 11 (truncated), 15 (terminated), 24 (truncated)
    seen = recorded(data, [member(data)])
    steps = seen.column("rewards", 0).long().numpy()  # the reward of step i is i
    assert set(steps) == set(range(25))
    standard = Spec.of(data).standardise(torch.from_numpy(data.observations))
    rows = data.observation_rows(steps)
    torch.testing.assert_close(seen.column("observations", 0), standard[rows])
    torch.testing.assert_close(seen.column("next_observations", 0), standard[rows + 1])
    np.testing.assert_allclose(seen.column("actions", 0).numpy(), data.actions[steps])
    # A truncated episode bootstraps from its real final observation.
    np.testing.assert_array_equal(seen.column("discounts", 0).numpy() == 0, np.isin(steps, [4, 15]))


def test_an_end_without_an_observation_is_left_out_unless_the_episode_terminated_there(make: Make) -> None:
    data = make(final_observed=False)
    steps = set(recorded(data, [member(data)]).column("rewards", 0).long().tolist())
    assert steps == set(range(25)) - {11, 24}


def test_batches_depend_on_the_seed_and_not_on_labels_or_neighbours(make: Make) -> None:
    data = make()
    other = np.random.default_rng(0).normal(size=25).astype(np.float32)
    alone = recorded(data, [member(data, 3)])
    among = recorded(data, [member(data, 1), member(data, 3), member(data, 3, rewards=other)])
    for name in ("observations", "actions", "next_observations", "discounts"):
        for p in (1, 2):
            assert torch.equal(alone.column(name, 0), among.column(name, p))
        assert name == "discounts" or not torch.equal(among.column(name, 0), among.column(name, 1))
    steps = alone.column("rewards", 0).long().numpy()
    assert torch.equal(among.column("rewards", 1), alone.column("rewards", 0))
    np.testing.assert_array_equal(among.column("rewards", 2).numpy(), other[steps])


def test_metrics_are_means_between_rows_with_one_row_for_the_last_step(make: Make) -> None:
    data, runs = make(), [member(make(), seed) for seed in range(2)]
    fine, coarse = (
        train(BC(hidden=(4,)), data, runs, Training(steps=10, batch_size=8, log_every=n), device=CPU).metrics
        for n in (1, 4)
    )
    assert coarse.schema == {"member": pl.Int32, "step": pl.Int64, "name": pl.String, "value": pl.Float64}
    assert coarse["step"].unique().sort().to_list() == [4, 8, 10]
    for p in range(2):
        each = fine.filter(pl.col("member") == p).sort("step")["value"].to_numpy()
        found = coarse.filter(pl.col("member") == p).sort("step")["value"].to_numpy()
        np.testing.assert_allclose(found, [each[:4].mean(), each[4:8].mean(), each[8:].mean()], rtol=1e-12)


def test_policies_are_evaluated_on_the_way_and_at_the_end(make: Make) -> None:
    data, runs = make(), [member(make(), seed) for seed in range(2)]
    calls: list[np.ndarray] = []

    def evaluate(policy: Policy) -> dict[str, np.ndarray]:
        calls.append(policy.act(torch.ones(2, 1, 3)).numpy())
        return {"score": np.array([len(calls), -len(calls)])}

    done: list[int] = []
    trained = train(
        BC(hidden=(4,)),
        data,
        runs,
        Training(steps=10, checkpoint_every=6),
        device=CPU,
        evaluate=evaluate,
        evaluate_every=4,
        on_checkpoint=lambda metrics: done.append(metrics.filter(pl.col("name") == "score").height),
    )
    scores = trained.metrics.filter(pl.col("name") == "score")
    assert scores["step"].to_list() == [4, 4, 8, 8, 10, 10]
    assert scores["value"].to_list() == [1, -1, 2, -2, 3, -3]
    assert not np.array_equal(calls[0], calls[1])
    assert done == [2, 6]
    np.testing.assert_array_equal(trained.policy.act(torch.ones(2, 1, 3)).numpy(), calls[-1])


def test_a_loss_that_is_not_finite_stops_with_member_and_step(make: Make, tmp_path: Path) -> None:
    data, runs = make(), [member(make(), seed, f"run{seed}") for seed in range(2)]
    training = Training(steps=20, log_every=10, checkpoint_every=5)
    with pytest.raises(WorkError, match=r"run1 \(member 1, seed 1\).* nan at step 7") as stopped:
        train(Diverging(), data, runs, training, device=CPU, checkpoint=tmp_path / "checkpoint")
    assert stopped.value.exit_code == 1
    assert checkpoint_members(tmp_path / "checkpoint") == ("run0", "run1")


def test_a_checkpoint_of_other_work_is_refused_and_kept(make: Make, tmp_path: Path) -> None:
    data, path = make(), tmp_path / "checkpoint"
    training = Training(steps=4)
    train(BC(hidden=(4,)), data, [member(data, 0, "a")], training, device=CPU, checkpoint=path)
    before = path.read_bytes()
    others = [
        (BC(hidden=(4,)), [member(data, 0, "b")], training, "members"),
        (BC(hidden=(4,)), [member(data, 1, "a")], training, "seeds"),
        (BC(hidden=(8,)), [member(data, 0, "a")], training, "algorithm"),
        (BC(hidden=(4,)), [member(data, 0, "a")], Training(steps=5), "training"),
    ]
    for algorithm, runs, settings, named in others:
        with pytest.raises(ConfigurationError, match=f"other work: its {named}"):
            train(algorithm, data, runs, settings, device=CPU, checkpoint=path)
    assert path.read_bytes() == before


def test_a_damaged_checkpoint_is_named(make: Make, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    assert checkpoint_members(path) is None
    for content in (b"", b"{}", b"\x08\x00\x00\x00\x00\x00\x00\x00{}      "):
        path.write_bytes(content)
        with pytest.raises(StoreError, match="checkpoint"):
            checkpoint_members(path)
        with pytest.raises(StoreError, match="policy"):
            load_policy(path)


KILLED = """
import sys, numpy as np, torch
from pathlib import Path
from algorithms import IQL
from algorithms.training import Member, Training, train
from data.trajectories import Trajectories
rng = np.random.default_rng(0)
data = Trajectories(
    rng.normal(size=(51, 3)).astype(np.float32), rng.uniform(-1, 1, (50, 2)).astype(np.float32), np.array([0, 50]),
    np.array([False]), np.array([True]), np.array([True]),
)
rewards = rng.normal(size=50).astype(np.float32)
training = Training(steps=400, batch_size=16, log_every=7, checkpoint_every=10)
trained = train(
    IQL(hidden=(16, 16)), data, [Member("a", rewards, 0), Member("b", rewards, 1)], training,
    device=torch.device("cpu"), checkpoint=Path(sys.argv[1]),
)
trained.metrics.write_ipc(sys.argv[2])
"""


def test_a_killed_process_goes_on_to_the_same_end(tmp_path: Path) -> None:
    def start(name: str) -> subprocess.Popen[bytes]:
        paths = [str(tmp_path / f"{name}.{end}") for end in ("checkpoint", "arrow")]
        return subprocess.Popen([sys.executable, "-c", KILLED, *paths])

    checkpoint = tmp_path / "killed.checkpoint"
    n_kills = 0
    for _ in range(3):
        written = checkpoint.stat().st_mtime_ns if checkpoint.exists() else None
        process = start("killed")
        while process.poll() is None:
            if checkpoint.exists() and checkpoint.stat().st_mtime_ns != written:
                process.send_signal(signal.SIGKILL)
                n_kills += 1
                break
            time.sleep(0.001)
        process.wait()
    assert n_kills
    for name in ("killed", "straight"):
        assert start(name).wait() == 0
    assert (tmp_path / "killed.checkpoint").read_bytes() == (tmp_path / "straight.checkpoint").read_bytes()
    assert pl.read_ipc(tmp_path / "killed.arrow").equals(pl.read_ipc(tmp_path / "straight.arrow"))


def test_rewards_that_do_not_fit_are_refused(make: Make) -> None:
    data = make()
    for rewards, message in (
        (np.zeros(24, np.float32), r"rewards are float32 \(24,\)"),
        (np.zeros(25), "float64"),
        (np.array([0] * 3 + [np.nan] + [0] * 21, np.float32), "reward of step 3 is nan"),
    ):
        with pytest.raises(DatasetError, match=message):
            train(BC(), data, [member(data, rewards=rewards)], Training(steps=1), device=CPU)


def test_data_without_a_transition_is_refused(make: Make) -> None:
    data = make(lengths=(1,), final_observed=False)
    cut = Trajectories(
        data.observations, data.actions, data.offsets, ~data.terminated, ~data.truncated, data.final_observed
    )
    with pytest.raises(DatasetError, match="no transition among 1 steps"):
        train(BC(), cut, [member(cut)], Training(steps=1), device=CPU)


def test_rewards_reach_the_members_they_belong_to(make: Make) -> None:
    data = make()
    zero, ten = np.zeros(25, np.float32), np.full(25, 10, np.float32)
    runs = [member(data, 0, rewards=zero), member(data, 0, rewards=ten)]
    metrics = train(IQL(hidden=(8,)), data, runs, Training(steps=1), device=CPU).metrics
    losses = metrics.filter(pl.col("name") == "q_loss").sort("member")["value"].to_list()
    assert losses[0] < 5 < 150 < losses[1]  # about 2 * 10**2


@pytest.mark.parametrize(("policy", "expected"), [("PASSIVE", "2"), ("ACTIVE", "1")])
def test_threads_are_used_only_if_idle_ones_sleep(policy: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1})
    before = torch.get_num_threads()
    with settled():
        assert str(torch.get_num_threads()) == expected
    assert torch.get_num_threads() == before


def test_importing_needs_neither_prefect_nor_mlflow() -> None:
    program = (
        "import sys, labelers, algorithms, algorithms.training, algorithms.evaluation\n"
        "assert not {'prefect', 'mlflow', 'gymnasium'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_batches_read_from_disk_are_those_from_memory(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    for n_actions in (None, (2, 3)):
        data = make(lengths=(5, 1, 7, 4), n_actions=n_actions, final_observed=False)
        rewards = [np.random.default_rng(i).normal(size=data.n_steps).astype(np.float32) for i in range(2)]
        members = [Member("a", rewards[0], 0), Member("b", rewards[1], 0), Member("c", rewards[0], 1)]
        settings = Training(steps=70, batch_size=16, log_every=10)
        resident = train(IQL(hidden=(8,)), data, members, settings, device=CPU)
        with monkeypatch.context() as patch:
            patch.setattr("algorithms.training.RESIDENT_BYTES", 0)
            mapped = train(IQL(hidden=(8,)), data, members, settings, device=CPU)
        assert mapped.metrics.equals(resident.metrics)
