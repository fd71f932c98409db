"""Policies: what training leaves, acts in environments, and is kept in one file each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import JsonValue
from torch import Tensor

from algorithms.files import read_tensors, write_tensors
from algorithms.spec import Spec
from labelers.networks import Networks

FORMAT = "assay policy, version 1"
ARRAYS = ("observation_mean", "observation_scale", "action_low", "action_high")


@dataclass(frozen=True, eq=False)
class Policy:
    """P policies of one kind: networks from standardised observations to what `Spec.decode` turns into actions.

    algorithm: configuration of what trained them, kept for the record.
    """

    spec: Spec
    networks: Networks
    algorithm: dict[str, JsonValue]

    @property
    def n_members(self) -> int:
        """P."""
        return self.networks.n_networks

    @torch.no_grad()
    def act(self, observations: Tensor) -> Tensor:
        """[P, B, *observation], not standardised, any dtype -> [P, B, *action], the best action, within bounds.

        The answer lies where the networks lie.
        """
        inputs = self.spec.standardise(observations.to(self.networks.weights[0].device))
        return self.spec.decode(self.networks(inputs))


def save_policy(policy: Policy, member: int, path: Path) -> None:
    """Write one member with all that it needs to act without its dataset."""
    spec = policy.spec
    tensors = {name: t[member : member + 1] for name, t in policy.networks.state_dict().items()}
    tensors |= {f"spec.{name}": torch.from_numpy(getattr(spec, name)) for name in ARRAYS}
    about: dict[str, JsonValue] = {
        "observation_shape": list(spec.observation_shape),
        "action_shape": list(spec.action_shape),
        "n_actions": None if spec.n_actions is None else list(spec.n_actions),
        "algorithm": policy.algorithm,
    }
    write_tensors(path, FORMAT, tensors, about)


def load_policy(path: Path) -> Policy:
    """Read what `save_policy` wrote: a policy of one member, on the CPU. Raises StoreError for any other file."""
    about, tensors = read_tensors(path, FORMAT)
    spec = Spec(
        observation_shape=tuple(about["observation_shape"]),
        action_shape=tuple(about["action_shape"]),
        n_actions=None if about["n_actions"] is None else tuple(about["n_actions"]),
        **{name: tensors.pop(f"spec.{name}").numpy() for name in ARRAYS},
    )
    return Policy(spec, Networks.of(tensors), about["algorithm"])
