"""Sets and decisions from arrays of probabilities: one object with ``fit`` and ``predict``, one plain function."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from fulgurite.modules.rocp import functional, functional_curve, functional_scores
from fulgurite.modules.rocp.functional_curve import Calibration, Hulls, Mode

Score = Literal["rocp", "rac", "lac", "aps", "raps", "socop"]
Rule = Literal["minimax", "maxmin", "best_response", "plug_in"]
CURVES = ("rocp", "rac")
Array = Any  # what torch.as_tensor takes


@dataclass
class ConformalDecision:
    """Prediction sets with a coverage guarantee, and the action to take.

    For exchangeable data, and whatever the probabilities are worth, the set holds the true label with probability at
    least 1 - alpha. The guarantee is marginal: over all samples, not for each patient or, unless ``class_conditional``,
    for each label.

    Args:
        loss: loss matrix (K, A): rows are true labels, columns are actions; needed by ``rocp``, ``rac`` and every rule.
        alpha: miscoverage level, in (0, 1).
        score: how sets are made: ``"rocp"`` and ``"rac"`` for the decision, ``"lac"``, ``"aps"``, ``"raps"``,
            ``"socop"`` from the probabilities alone.
        rule: how an action is chosen: ``"minimax"`` of the set (Lemma 2.1), ``"maxmin"`` (the same with alpha = 0),
            ``"best_response"`` to the probabilities without a set, ``"plug_in"`` (ROCP's and RAC's own action at the
            calibrated price).
        mode: ``"exact"`` calibration by candidate labels; ``"plus"`` and ``"global"`` are for comparison, see
            :func:`fulgurite.modules.rocp.functional_curve.calibrate`.
        class_conditional: cover each label with 1 - alpha.
        randomized: subtract a uniform share of the label's probability in APS and RAPS.
        penalty: of RAPS per rank, of SOCOP per label; None takes 0.05 and 0.1.
        free_rank: RAPS's rank without penalty.
        allow_empty: False puts the most probable label into an empty set, which can only raise the coverage.
        seed: of the randomised scores.

    Raises:
        ValueError: an argument is out of range, or does not go with another.
    """

    loss: Array | None = None
    alpha: float = 0.1
    score: Score = "rocp"
    rule: Rule = "minimax"
    mode: Mode = "exact"
    class_conditional: bool = False
    randomized: bool = False
    penalty: float | None = None
    free_rank: int = 1
    allow_empty: bool = True
    seed: int = 0

    probabilities_: Tensor | None = field(default=None, init=False, repr=False)
    labels_: Tensor | None = field(default=None, init=False, repr=False)
    thresholds_: Tensor | None = field(default=None, init=False, repr=False)
    calibrations_: list[Calibration] = field(default_factory=list, init=False, repr=False)
    _hulls: Hulls | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        functional.check_alpha(self.alpha)
        for name, choices in (("score", Score), ("rule", Rule), ("mode", Mode)):
            if getattr(self, name) not in get_args(choices):
                raise ValueError(f"{name} is {getattr(self, name)!r}; choose one of {', '.join(get_args(choices))}")
        if self.loss is not None:
            self.loss = functional.check_loss(self.loss)
        elif self.score in CURVES:
            raise ValueError(f"score {self.score!r} needs a loss matrix (labels, actions)")
        if self.rule == "plug_in" and self.score not in CURVES:
            raise ValueError(f"rule 'plug_in' is ROCP's or RAC's own action; score is {self.score!r}")
        if self.rule == "plug_in" and self.class_conditional:
            raise ValueError("rule 'plug_in' needs one price for all labels; class_conditional has one for each")
        if self.mode != "exact" and self.score not in CURVES:
            raise ValueError(f"mode {self.mode!r} is for the scores rocp and rac; score is {self.score!r}")
        if self.randomized and self.score not in ("aps", "raps"):
            raise ValueError(f"randomized is for the scores aps and raps; score is {self.score!r}")

    def fit(self, probabilities: Array, labels: Array) -> "ConformalDecision":
        """Calibrate on probabilities (N, K) and labels (N,) that trained nothing; returns itself.

        Raises:
            ValueError: probabilities, labels or the shape of the loss matrix are not valid, or there are no samples.
        """
        p = functional.check_probabilities(probabilities)
        y = functional.check_labels(labels, p.shape[1])
        if self.loss is not None:
            functional.check_loss(self.loss, p.shape[1])
        if len(p) != len(y):
            raise ValueError(f"there are {len(p)} rows of probabilities and {len(y)} labels")
        if len(y) == 0:
            raise ValueError("the calibration set is empty")
        self.probabilities_, self.labels_ = p, y
        if self.score in CURVES:
            self._hulls = functional_curve.selector_hulls(p, self._loss(p.shape[1]), self._curve)
        self._calibrate()
        return self

    def _calibrate(self) -> None:
        """What depends on alpha, the mode and ``class_conditional``."""
        p, y = self._fitted()
        if self._hulls is not None:
            self.calibrations_ = functional_curve.calibrate_labels(
                self._hulls, y, self._loss(p.shape[1]), self.alpha, self.mode, self.class_conditional
            )
        else:
            scores = self._scores(p, stream=0)
            self.thresholds_ = functional_scores.score_thresholds(scores, y, self.alpha, self.class_conditional)

    def recalibrate(self, **changes: Any) -> "ConformalDecision":
        """The same calibration data under other arguments, such as ``alpha`` or ``loss``."""
        probabilities, labels = self._fitted()
        changed = replace(self, **changes)
        if changes.keys() & {"loss", "score"} or self._hulls is None:
            return changed.fit(probabilities, labels)
        changed.probabilities_, changed.labels_, changed._hulls = probabilities, labels, self._hulls
        changed._calibrate()
        return changed

    def predict_sets(self, probabilities: Array, index: Tensor | None = None) -> Any:
        """The sets (N, K), boolean; a Tensor for a Tensor, else a NumPy array.

        Args:
            probabilities: (N, K).
            index: (N,) number of each sample among all that are predicted, for randomised scores: it chooses the
                sample's draw. None counts from 0, so samples that come in several calls need it.
        """
        return _like(self._sets(functional.check_probabilities(probabilities), index)[0], probabilities)

    def predict(self, probabilities: Array, index: Tensor | None = None) -> Any:
        """The actions (N,); a Tensor for a Tensor, else a NumPy array. ``index`` is as for :meth:`predict_sets`.

        Raises:
            ValueError: there is no loss matrix.
        """
        return _like(self.decide(probabilities, index)[1], probabilities)

    def decide(self, probabilities: Array, index: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Sets (N, K) and actions (N,) together, as Tensors; ``index`` is as for :meth:`predict_sets`."""
        p = functional.check_probabilities(probabilities)
        loss = self._loss(p.shape[1])
        sets, hulls = self._sets(p, index)
        if self.rule == "best_response":
            return sets, functional.best_response(p, loss)
        if self.rule == "plug_in":
            assert hulls is not None
            return sets, functional_curve.selected_action(hulls, self.calibrations_[0].price)
        return sets, functional.minimax_action(sets, loss, self.alpha if self.rule == "minimax" else 0.0)

    @property
    def _curve(self) -> functional_curve.Curve:
        return "rac" if self.score == "rac" else "rocp"

    def _fitted(self) -> tuple[Tensor, Tensor]:
        if self.probabilities_ is None or self.labels_ is None:
            raise ValueError("call fit(probabilities, labels) with calibration data first")
        return self.probabilities_, self.labels_

    def _loss(self, n_labels: int) -> Tensor:
        if self.loss is None:
            raise ValueError("an action needs a loss matrix (labels, actions)")
        return functional.check_loss(self.loss, n_labels)

    def _sets(self, p: Tensor, index: Tensor | None) -> tuple[Tensor, Hulls | None]:
        calibration_p, _ = self._fitted()
        if p.shape[1] != calibration_p.shape[1]:
            raise ValueError(
                f"there are {p.shape[1]} labels here, and {calibration_p.shape[1]} in the calibration data"
            )
        hulls = None
        if self.score in CURVES:
            loss = self._loss(p.shape[1])
            hulls = functional_curve.selector_hulls(p, loss, self._curve)
            sets = functional_curve.calibrated_sets(hulls, loss, self.calibrations_)
        else:
            assert self.thresholds_ is not None
            sets = self._scores(p, stream=1, index=index) <= self.thresholds_
        if not self.allow_empty:
            sets[torch.arange(len(p)), p.argmax(1)] |= ~sets.any(1)
        return sets, hulls

    def _scores(self, p: Tensor, stream: int, index: Tensor | None = None) -> Tensor:
        uniform = None
        if self.randomized and len(p):
            index = torch.arange(len(p)) if index is None else torch.as_tensor(index)
            draws = np.random.default_rng((self.seed, stream)).random(int(index.max()) + 1)
            uniform = torch.from_numpy(draws)[index]
        scores: dict[str, Callable[[], Tensor]] = {
            "lac": lambda: functional_scores.lac_scores(p),
            "aps": lambda: functional_scores.aps_scores(p, uniform),
            "raps": lambda: functional_scores.raps_scores(p, self._penalty(0.05), self.free_rank, uniform),
            "socop": lambda: functional_scores.socop_scores(p, self._penalty(0.1)),
        }
        return scores[self.score]()

    def _penalty(self, default: float) -> float:
        return default if self.penalty is None else self.penalty


def conformal_decision(
    calibration_probabilities: Array,
    calibration_labels: Array,
    probabilities: Array,
    loss: Array | Sequence[Sequence[float]],
    alpha: float = 0.1,
    score: Score = "rocp",
    rule: Rule = "minimax",
) -> tuple[Any, Any]:
    """Sets (N, K) and actions (N,) in one call; the arguments are those of :class:`ConformalDecision`."""
    decision = ConformalDecision(loss, alpha, score, rule).fit(calibration_probabilities, calibration_labels)
    sets, actions = decision.decide(probabilities)
    return _like(sets, probabilities), _like(actions, probabilities)


def _like(result: Tensor, given: Array) -> Any:
    return result if isinstance(given, Tensor) else result.numpy()
