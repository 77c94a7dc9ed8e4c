"""Conformal calibration and decisions as a callback for any classifier.

Paper: Tao Wang, Edgar Dobriban, "Optimal Decision-Making Based on Prediction Sets", ICML 2026 (arXiv 2602.00989).
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor
from torch.utils.data import DataLoader

from fulgurite.callbacks.conformal_data import (
    Calibration,
    batch_field,
    calibration_loader,
    checked_logits,
    gather_in_order,
    gather_shards,
    sampler_of_test,
    share_of,
    weights_fingerprint,
)
from fulgurite.callbacks.conformal_report import (
    TestedArm,
    critical_pairs,
    draw,
    measure,
    names_of,
    read_loss_matrix,
    table_csv,
    table_markdown,
)
from fulgurite.callbacks.reporting import MetricTable, log_figure, save_figure
from fulgurite.modules.rocp.functional import check_alpha, check_loss
from fulgurite.modules.rocp.functional_curve import Mode
from fulgurite.modules.rocp.functional_decision import ConformalDecision, Rule, Score
from fulgurite.storage import write_text

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Arm:
    """One way to make sets and to act on them; the fields are those of ``ConformalDecision``.

    Args:
        score: how sets are made.
        rule: how an action is chosen.
        alpha: miscoverage level; None takes the callback's.
        mode: of the calibration of ``rocp`` and ``rac``.
        class_conditional: cover each label with 1 - alpha.
        randomized: randomise APS and RAPS.
        penalty: of RAPS and SOCOP.
        free_rank: of RAPS.
        allow_empty: whether a set may be empty.
    """

    score: Score = "rocp"
    rule: Rule = "minimax"
    alpha: float | None = None
    mode: Mode = "exact"
    class_conditional: bool = False
    randomized: bool = False
    penalty: float | None = None
    free_rank: int = 1
    allow_empty: bool = True


class ConformalCalibration(Callback):
    """Calibrate a classifier on held-out data, and test prediction sets and decisions of several arms side by side.

    Works on any LightningModule that gives logits. The calibration data are the data set and the collate function of
    the data module's ``calibration_dataloader()``, passed through the model in evaluation mode in a fixed order; where
    there is none the validation data take its place, with a warning. The logits and labels of the calibration data are
    kept in the checkpoint, computed with the very weights that it holds; what is varied at test time (levels, losses,
    scores, rules) is an argument and is not kept.

    Metrics are logged as ``test/<arm>_<name>``: coverage, size, coverage of the worst label and set size, and with a
    loss matrix loss, its quantiles, robust risk, and critical mistakes in total and by label. They stand side by side
    in ``conformal.csv`` below the Trainer's ``default_root_dir``. At ``predict`` the sets and actions join the outputs
    of a ``predict_step`` that returns a dict.

    Args:
        loss_matrix: rows (labels) of losses by action, or the path of a ``.npy`` or ``.csv`` file; a CSV may name the
            actions in its first row and the labels in its first column.
        alpha: miscoverage level.
        arms: name -> arm; None is ROCP alone, or LAC alone without a loss matrix.
        label_names: None takes the module's ``class_names``, else numbers.
        action_names: None numbers them.
        critical: pairs (label, action), by name or number, that are critical mistakes.
        inputs: key of a dict batch that goes into the model; of a tuple the first entry does.
        labels: key of a dict batch with the true labels; of a tuple the second entry.
        output: key or attribute under which a step's or the model's output holds the logits.
        call: dotted attribute of the module to call for logits, such as ``"network"``; None calls the module.
        temperature: logits are divided by it.
        quantiles: levels of the loss quantiles to log.
        sweep: levels of alpha for the figure of loss against alpha; empty leaves it out.
        store: keep the calibration data's logits in the checkpoint; a pass over them for every checkpoint written.
        recalibrate: calibrate anew at a test, also where the checkpoint holds a calibration: on other data, say.
        seed: of randomised scores.
        name: tells several of these callbacks apart; metrics become ``test/<name>_<arm>_...``.

    Raises:
        ValueError: an argument is out of range, or a name is unknown.
        FileNotFoundError: the loss matrix's file does not exist.
    """

    def __init__(
        self,
        loss_matrix: list[list[float]] | str | None = None,
        alpha: float = 0.1,
        arms: dict[str, Arm] | None = None,
        label_names: list[str] | None = None,
        action_names: list[str] | None = None,
        critical: list[tuple[str | int, str | int]] | None = None,
        inputs: str = "image",
        labels: str = "label",
        output: str = "logits",
        call: str | None = None,
        temperature: float = 1.0,
        quantiles: Sequence[float] = (0.95,),
        sweep: Sequence[float] = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3),
        store: bool = True,
        recalibrate: bool = False,
        seed: int = 0,
        name: str = "",
    ) -> None:
        super().__init__()
        check_alpha(alpha)
        for level in sweep:
            check_alpha(level)
        if not 0 < temperature < float("inf"):
            raise ValueError(f"temperature is {temperature}; give a value above 0")
        if not all(0 <= level <= 1 for level in quantiles):
            raise ValueError(f"quantiles are {list(quantiles)}; give levels in [0, 1]")
        self.loss: Tensor | None = None
        self._row_names: list[str] | None = None  # the labels that the loss matrix's file names
        if isinstance(loss_matrix, str):
            matrix, self._row_names, file_actions = read_loss_matrix(Path(loss_matrix).expanduser())
            action_names = action_names or file_actions
            self.loss = check_loss(matrix)
        elif loss_matrix is not None:
            self.loss = check_loss(loss_matrix)
        self.alpha = alpha
        default = {"rocp": Arm()} if self.loss is not None else {"lac": Arm("lac", "maxmin")}
        # In Python an arm may be the mapping that it is in a YAML.
        given: Mapping[str, Any] = arms or default
        self.arms = {arm: Arm(**fields) if isinstance(fields, Mapping) else fields for arm, fields in given.items()}
        self.label_names = label_names
        self.action_names = action_names
        self.critical = critical or []
        self.inputs, self.labels, self.output, self.call = inputs, labels, output, call
        self.temperature = temperature
        self.quantiles, self.sweep = list(quantiles), list(sweep)
        self.store, self.recalibrate, self.seed, self.name = store, recalibrate, seed, name
        for arm in self.arms:
            if not arm.replace("_", "").isalnum():
                raise ValueError(
                    f"arm {arm!r}: give a name of letters, digits and underscores, it becomes part of a metric's"
                )
            self._decision(self.arms[arm])  # refuses arguments that do not go together

        self.metric_table: MetricTable | None = None
        self._calibration: Calibration | None = None
        self._fitted: dict[str, ConformalDecision] = {}
        self._predicted = 0
        self._test: list[tuple[Tensor, Tensor, Tensor]] = []

    @property
    def state_key(self) -> str:
        return f"ConformalCalibration[{self.name}]" if self.name else "ConformalCalibration"

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._order_rows(self.label_names or getattr(pl_module, "class_names", None))
        if stage == "fit" and self.store:
            calibration_loader(trainer)  # what is missing is missed now, not after the first epoch

    def _order_rows(self, label_names: Sequence[str] | None) -> None:
        """Put the rows of a loss matrix that names its labels into the order of the labels."""
        if self._row_names is None or self.loss is None:
            return
        names = list(label_names or self._row_names)
        if sorted(names) != sorted(self._row_names):
            raise ValueError(f"the loss matrix's file has the labels {self._row_names}, the classifier has {names}")
        self.loss = self.loss[[self._row_names.index(name) for name in names]]
        self._row_names = self.label_names = names

    def state_dict(self) -> dict[str, Any]:
        return {} if self._calibration is None else asdict(self._calibration)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict:
            self._calibration = Calibration(**state_dict)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if not self.store or trainer.state.fn != "fit" or trainer.interrupted:
            checkpoint["callbacks"].pop(self.state_key, None)  # it would be that of earlier weights
            return
        if not self._is_of(pl_module):
            self._calibrate(trainer, pl_module)
        # The Trainer has asked for the states already, before any callback knew that a checkpoint is due.
        checkpoint["callbacks"][self.state_key] = self.state_dict()

    def _is_of(self, pl_module: LightningModule) -> bool:
        """Whether there is a calibration, and it was made with the module's present weights."""
        if self._calibration is None:
            return False
        kept, present = self._calibration.fingerprint, weights_fingerprint(pl_module)
        return kept.shape == present.shape and torch.allclose(kept, present, rtol=1e-6, atol=0, equal_nan=True)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._test = []
        self._ensure_calibrated(trainer, pl_module)

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._ensure_calibrated(trainer, pl_module)
        self._predicted = 0
        self._fitted = {name: self._fit(arm) for name, arm in self.arms.items()}

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if dataloader_idx:
            raise ValueError("ConformalCalibration tests one data loader; give the others a run of their own")
        labels = self._labels_of(batch)
        logits = self._logits_of_step(trainer, pl_module, outputs, batch)
        if len(logits) != len(labels):
            raise ValueError(f"the test step gives {len(logits)} rows of logits for {len(labels)} labels")
        seen = sum(len(part[0]) for part in self._test)
        local = torch.arange(seen, seen + len(labels))
        shares, own = share_of(trainer)
        positions = local * shares + own if sampler_of_test(trainer) is not None else local
        self._test.append((positions, logits.float().cpu(), labels.cpu()))

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._test:
            return  # no batch was tested
        positions, logits, labels = (torch.cat(parts) for parts in zip(*self._test, strict=True))
        sampler = sampler_of_test(trainer)
        if sampler is not None or trainer.world_size == 1:
            n = None if sampler is None else len(sampler.dataset)  # type: ignore[arg-type]
            logits, labels = gather_in_order(trainer, positions, logits, labels, limit=n)
        else:
            logits, labels = gather_shards(trainer, logits, labels)
        self._test = []
        self._report(trainer, pl_module, self._probabilities(logits), labels)

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if not isinstance(outputs, dict):
            return
        logits = self._logits_of_step(trainer, pl_module, outputs, batch)
        p = self._probabilities(logits.float().cpu())
        shares, own = share_of(trainer)
        index = own + shares * torch.arange(self._predicted, self._predicted + len(p))
        self._predicted += len(p)
        for name, decision in self._fitted.items():
            if decision.rule != "best_response":
                outputs[f"{name}_set"] = decision.predict_sets(p, index)
            if self.loss is not None:
                outputs[f"{name}_action"] = decision.predict(p, index)

    def _ensure_calibrated(self, trainer: Trainer, pl_module: LightningModule) -> None:
        source = "kept with these weights"
        if self.recalibrate or not self._is_of(pl_module):
            self._calibrate(trainer, pl_module)
            source = "computed now"
        assert self._calibration is not None
        n = len(self._calibration.labels)
        log.info("conformal calibration on %d samples, %s; alpha %g", n, source, self.alpha)

    def _calibrate(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Pass the calibration data through the model; every rank takes its share and gets the whole."""
        loader, chosen = calibration_loader(trainer, warn=trainer.state.fn != "fit")  # a fit has warned at its start
        # Every rank takes the same number of samples, so that a sharded model is called equally often on each, and no
        # set is too small for the ranks; what is taken twice is dropped by its position.
        shares, own_share = share_of(trainer)
        positions = [(own_share + step * shares) % len(chosen) for step in range(-(-len(chosen) // shares))]
        own = DataLoader(
            loader.dataset,
            batch_size=loader.batch_size,
            sampler=[chosen[position] for position in positions],
            collate_fn=loader.collate_fn,
            num_workers=loader.num_workers,
            generator=torch.Generator(),
        )
        training, stage = [module for module in pl_module.modules() if module.training], trainer.state.stage
        pl_module.eval()
        if trainer.state.fn == "fit":
            trainer.validating = True  # a hook that augments training batches leaves these alone
        parts = []
        with torch.no_grad():
            for batch in own:
                batch = trainer.precision_plugin.convert_input(batch)
                batch = trainer.strategy.batch_to_device(batch, dataloader_idx=0)
                parts.append((self._forward(trainer, pl_module, batch).float().cpu(), self._labels_of(batch).cpu()))
        trainer.state.stage = stage
        for module in training:
            module.training = True
        logits, labels = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        if len(logits) != len(labels):
            raise ValueError(f"the model gives {len(logits)} rows of logits for {len(labels)} labels")
        if self.loss is not None:
            check_loss(self.loss, logits.shape[1])  # during the fit, not only at its test
        logits, labels = gather_in_order(trainer, torch.tensor(positions), logits, labels, limit=len(chosen))
        self._calibration = Calibration(logits, labels, weights_fingerprint(pl_module))

    def _forward(self, trainer: Trainer, pl_module: LightningModule, batch: Any) -> Tensor:
        target: Any = pl_module
        for part in self.call.split(".") if self.call else ():
            if not hasattr(target, part):
                raise ValueError(f"call is {self.call!r}, but {type(target).__name__} has no attribute {part!r}")
            target = getattr(target, part)
        inputs = batch_field(batch, self.inputs, 0, "inputs")
        with torch.no_grad(), trainer.precision_plugin.forward_context():
            output = target(inputs)
        found = output[0] if isinstance(output, tuple | list) and output else output
        logits = found if isinstance(found, Tensor) else self._named(found)
        if logits is None:
            raise ValueError(
                f"the output of {type(target).__name__} is a {type(output).__name__} without {self.output!r}; name the "
                "key or attribute that holds the logits by output, or the attribute of the module to call by call"
            )
        return checked_logits(logits)

    def _logits_of_step(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any) -> Tensor:
        """The logits that a step returned under their name, else those of one more forward pass."""
        # With `call` the step's logits may be another head's, and a bare tensor may be anything.
        named = self._named(outputs) if self.call is None and not isinstance(outputs, Tensor) else None
        return self._forward(trainer, pl_module, batch) if named is None else checked_logits(named)

    def _named(self, output: Any) -> Tensor | None:
        return output.get(self.output) if isinstance(output, Mapping) else getattr(output, self.output, None)

    def _labels_of(self, batch: Any) -> Tensor:
        labels = batch_field(batch, self.labels, 1, "labels")
        if labels.is_floating_point() and not torch.equal(labels, labels.round()):
            raise ValueError("the labels are no whole numbers; give the index of each sample's label")
        return labels.long()

    def _probabilities(self, logits: Tensor) -> Tensor:
        return (logits.double() / self.temperature).softmax(-1)

    def _decision(self, arm: Arm) -> ConformalDecision:
        alpha = self.alpha if arm.alpha is None else arm.alpha
        return ConformalDecision(**{**asdict(arm), "alpha": alpha, "loss": self.loss, "seed": self.seed})

    def _fit(self, arm: Arm) -> ConformalDecision:
        assert self._calibration is not None
        kept = self._calibration
        return self._decision(arm).fit(self._probabilities(kept.logits), kept.labels)

    def _report(self, trainer: Trainer, pl_module: LightningModule, p: Tensor, labels: Tensor) -> None:
        label_names = self.label_names or getattr(pl_module, "class_names", None)
        n_actions = 0 if self.loss is None else self.loss.shape[1]
        names = names_of(label_names, p.shape[1], self.action_names, n_actions)
        fitted = {name: self._fit(arm) for name, arm in self.arms.items()}
        tested = {name: TestedArm.of(decision, p, labels) for name, decision in fitted.items()}
        pairs = critical_pairs(self.critical, names)
        rows = {name: measure(arm, pairs, self.quantiles, names[0]) for name, arm in tested.items()}
        prefix = f"test/{self.name}_" if self.name else "test/"
        for arm, row in rows.items():
            for metric, value in row.items():
                # Every rank has the same value; asked to synchronise, Lightning does not warn that it should be.
                self.log(f"{prefix}{arm}_{metric}", value, sync_dist=trainer.world_size > 1)  # type: ignore[attr-defined]
        self.metric_table = MetricTable.of(rows, prefix)
        if trainer.is_global_zero and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            folder, stem = Path(trainer.default_root_dir), f"{self.name}_" if self.name else ""
            write_text(folder / f"{stem}conformal.csv", table_csv(rows))
            for logger in trainer.loggers:
                if isinstance(logger, TensorBoardLogger):
                    logger.experiment.add_text(f"test/{stem}conformal", table_markdown(rows), trainer.global_step)
            for title, figure in draw(tested, names, self.sweep).items():
                save_figure(figure, folder / "figures" / f"test_{stem}{title}.png")
                log_figure(figure, f"test/{stem}{title}", trainer)
