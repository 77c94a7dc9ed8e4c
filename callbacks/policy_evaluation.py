"""A critic's action gradient where the policy goes, and how far the best action moves with the state."""

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from fulgurite.callbacks.reporting import log_figure, save_figure
from fulgurite.modules.pave.figures import bound_figure, surface_figure
from fulgurite.modules.pave.functional import DELTA
from fulgurite.modules.pave.functional_hessian import argmax_jacobian, critic_geometry, mixed_hessian
from fulgurite.storage import atomic_path

log = logging.getLogger(__name__)

GRID = 50  # points of the surface along each axis


class PolicyEvaluation(Callback):
    """Measure the first critic on the pairs (s, pi(s)) that validation and test visit.

    Logs, as ``<stage>/<name>``: ``M_mean`` and ``M_sup``, the largest singular value of Q_as; ``neg_def_rate``, the
    share of pairs at which Q_aa is negative definite; ``concavity_rate``, tr Q_aa < -delta; ``flip_rate`` and
    ``gradient_cosine`` of consecutive action gradients in an episode. With ``jacobian_states`` also ``J_share``, the
    share of states whose best action is an interior strict maximum, and there: ``J_formula_error``, the largest
    difference between the measured slope of the best action and -Q_aa^-1 Q_as, relative to it; ``J_mean``, ``J_sup``;
    ``J_within_bound``, the share within M / mu; ``policy_slope_mean`` and ``policy_slope_sup``, of the actor itself.

    The module has an ``act`` and a ``critic``: (B, S), (B, A) -> (C, B).

    Args:
        max_pairs: pairs that are measured, evenly chosen.
        delta: floor of the curvature, for the concavity rate.
        jacobian_states: states at which the slope of the best action is measured; costly.
        surface: draw |Q_as| around a visited pair.
        surface_pair: state and action dimension of the surface; None means those with the largest mixed partial.
        surface_limit: upper end of its colours, the same for methods side by side; None means the largest value.
        video: at test, save a GIF of one episode, for environments that can be rendered.

    Raises:
        ValueError: a number is out of range.
        TypeError: the module has no ``act`` or ``critic``.
    """

    def __init__(
        self,
        max_pairs: int = 2000,
        delta: float = DELTA,
        jacobian_states: int = 0,
        surface: bool = True,
        surface_pair: tuple[int, int] | None = None,
        surface_limit: float | None = None,
        video: bool = False,
    ) -> None:
        if max_pairs < 1:
            raise ValueError(f"max_pairs is {max_pairs}; give 1 or more")
        if jacobian_states < 0:
            raise ValueError(f"jacobian_states is {jacobian_states}; give 0 (not measured) or more")
        for name, value in (("delta", delta), ("surface_limit", surface_limit)):
            if value is not None and not 0 <= value < float("inf"):
                raise ValueError(f"{name} is {value}; give a finite number of 0 or more")
        self.max_pairs, self.delta, self.jacobian_states = max_pairs, delta, jacobian_states
        self.surface, self.surface_pair, self.surface_limit = surface, surface_pair, surface_limit
        self.video = video
        self._visited: list[Tensor] = []
        self._in_order = True

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        for name in ("act", "critic"):
            if not hasattr(pl_module, name):
                raise TypeError(
                    f"PolicyEvaluation needs a module with act and critic; {type(pl_module).__name__} has no {name}"
                )

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._visited, self._in_order = [], True

    on_test_epoch_start = on_validation_epoch_start

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._visited.append(batch["observation"].detach().clone())
        # A batch with rewards is an episode; one without holds states that have nothing to do with each other.
        self._in_order &= "reward" in batch

    on_test_batch_end = on_validation_batch_end

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._report(trainer, pl_module, "val")

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._report(trainer, pl_module, "test")
        if self.video and trainer.is_global_zero:
            self._film(trainer)

    def _report(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not self._visited:
            return
        episodes = torch.cat([torch.full((len(s),), number) for number, s in enumerate(self._visited)])
        states = torch.cat(self._visited)
        # Whole stretches of steps, so that neighbours stay neighbours.
        if len(states) * trainer.world_size > self.max_pairs:
            share = max(1, self.max_pairs // (len(self._visited) * trainer.world_size))
            kept = torch.cat(
                [(episodes == number).nonzero().squeeze(1)[:share] for number in range(len(self._visited))]
            )
            states, episodes = states[kept], episodes[kept]
        module: Any = pl_module
        with torch.no_grad():
            actions: Tensor = module.act(states)
        critic = first_critic(pl_module)
        geometry = critic_geometry(critic, states, actions, self.delta, episodes if self._in_order else None)
        self._log(pl_module, stage, "M_mean", geometry.mixed_mean)
        self._log(pl_module, stage, "M_sup", geometry.mixed_sup, "max")
        self._log(pl_module, stage, "neg_def_rate", geometry.negative_definite_rate)
        self._log(pl_module, stage, "concavity_rate", geometry.concavity_rate)
        if np.isfinite(geometry.flip_rate):
            self._log(pl_module, stage, "flip_rate", geometry.flip_rate)
            self._log(pl_module, stage, "gradient_cosine", geometry.gradient_cosine)
        if self.jacobian_states:
            self._measure_slopes(trainer, pl_module, stage, states)
        if self.surface and trainer.is_global_zero and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._draw_surface(trainer, critic, stage, states, actions)

    def _measure_slopes(self, trainer: Trainer, pl_module: LightningModule, stage: str, states: Tensor) -> None:
        """The slope of the best action by differences, the formula and the bound beside it, and the actor's slope."""
        chosen = states[torch.linspace(0, len(states) - 1, min(self.jacobian_states, len(states))).long()].double()
        with torch.inference_mode(False):  # a copy that can be differentiated
            double: Any = copy.deepcopy(pl_module.critic).double()
        generator = torch.Generator().manual_seed(0)
        module: Any = pl_module
        n_actions = module.act(states[:1]).shape[-1]
        found = argmax_jacobian(lambda s, a: double(s, a)[0], chosen, n_actions, generator=generator)
        slope = policy_slopes(pl_module, chosen.to(states)).double()
        self._log(pl_module, stage, "J_share", found.share)
        self._log(pl_module, stage, "policy_slope_mean", float(slope.mean()))
        self._log(pl_module, stage, "policy_slope_sup", float(slope.max()), "max")
        kept = found.qualifies
        if not kept.any():
            return
        size = torch.linalg.matrix_norm(found.formula[kept], 2).clamp(min=1e-12)
        error = torch.linalg.matrix_norm(found.jacobian[kept] - found.formula[kept], 2) / size
        within = found.norm[kept] <= found.bound[kept] * (1 + 1e-4)
        self._log(pl_module, stage, "J_formula_error", float(error.max()), "max")
        self._log(pl_module, stage, "J_mean", float(found.norm[kept].mean()))
        self._log(pl_module, stage, "J_sup", float(found.norm[kept].max()), "max")
        self._log(pl_module, stage, "J_within_bound", float(within.double().mean()))
        if trainer.is_global_zero and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            parts = (found.bound[kept], found.norm[kept], slope[kept])
            self._save(trainer, bound_figure(*(part.cpu().numpy() for part in parts)), f"{stage}_bound")

    def _draw_surface(
        self, trainer: Trainer, critic: Callable[[Tensor, Tensor], Tensor], stage: str, states: Tensor, actions: Tensor
    ) -> None:
        """|Q_as| on a grid around the visited pair in the middle of the first episode."""
        s, a = states[len(states) // 2], actions[len(states) // 2]
        mixed = mixed_hessian(critic, s[None], a[None])[0].abs()
        row = int(mixed.argmax())
        pair = self.surface_pair or (row % mixed.shape[1], row // mixed.shape[1])
        offsets = torch.linspace(-1, 1, GRID, device=s.device)
        values = torch.linspace(-1.5, 1.5, GRID, device=s.device)
        grid_s, grid_a = s.repeat(GRID, GRID, 1), a.repeat(GRID, GRID, 1)
        grid_s[..., pair[0]] += offsets[:, None]
        grid_a[..., pair[1]] = values[None]
        bend = torch.linalg.matrix_norm(mixed_hessian(critic, grid_s.flatten(0, 1), grid_a.flatten(0, 1)), 2)
        surface = bend.reshape(GRID, GRID).cpu().numpy()
        figure = surface_figure(offsets.cpu().numpy(), values.cpu().numpy(), surface, pair, self.surface_limit)
        self._save(trainer, figure, f"{stage}_surface")

    def _save(self, trainer: Trainer, figure: Any, name: str) -> None:
        save_figure(figure, Path(trainer.default_root_dir) / "figures" / f"{name}.png")
        log_figure(figure, name.replace("_", "/", 1), trainer)

    def _film(self, trainer: Trainer) -> None:
        """A GIF of one episode."""
        from PIL import Image

        film: Any = getattr(getattr(trainer, "datamodule", None), "film", None)
        if film is None:
            log.info("no video: the data module has no film()")
            return
        frames = film()
        path = Path(trainer.default_root_dir) / "figures" / "test_episode.gif"
        images = [Image.fromarray(frame) for frame in frames]
        with atomic_path(path) as temporary:
            images[0].save(temporary, save_all=True, append_images=images[1:], duration=40, loop=0)

    def _log(self, pl_module: LightningModule, stage: str, name: str, value: float, reduce: str = "mean") -> None:
        pl_module.log(f"{stage}/{name}", value, sync_dist=pl_module.trainer.world_size > 1, reduce_fx=reduce)


def first_critic(module: LightningModule) -> Callable[[Tensor, Tensor], Tensor]:
    """The module's first critic: (B, S), (B, A) -> (B,)."""
    critic: Any = module.critic
    return lambda s, a: critic(s, a)[0]


def policy_slopes(module: Any, states: Tensor) -> Tensor:
    """The spectral norm (B,) of the actor's own Jacobian at states (B, S)."""
    with torch.inference_mode(False), torch.enable_grad():
        jacobian = torch.func.vmap(torch.func.jacrev(lambda s: module.act(s[None])[0]))(states.detach().clone())
        slopes: Tensor = torch.linalg.matrix_norm(jacobian.detach(), 2)
        return slopes
