import csv
import logging
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, SubsetRandomSampler, WeightedRandomSampler

from fulgurite.callbacks import ConformalCalibration, RunCheckpoint
from fulgurite.callbacks.conformal import Arm
from fulgurite.callbacks.conformal_data import fixed_indices, gather_in_order
from fulgurite.callbacks.conformal_report import read_loss_matrix
from fulgurite.datamodules import DigitsHazard
from fulgurite.modules import Classifier, ConformalDecision

LOSS = [[0, 8, 8, 6], [50, 0, 7, 3], [50, 7, 0, 2], [50, 6, 6, 0]]
ARMS = {
    "rocp": Arm(),
    "rac": Arm("rac", "maxmin"),
    "lac": Arm("lac", "maxmin"),
    "aps": Arm("aps", "maxmin", randomized=True),
    "best": Arm(rule="best_response"),
    "own": Arm(rule="plug_in"),
}


def trainer(tmp_path, *callbacks, **options):
    options = {"logger": False, "max_epochs": 1} | options
    return Trainer(
        accelerator="cpu", enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
        enable_checkpointing=any(isinstance(callback, RunCheckpoint) for callback in callbacks),
        callbacks=list(callbacks), **options,
    )  # fmt: skip


def conformal(**arguments):
    return ConformalCalibration(**({"loss_matrix": LOSS, "arms": ARMS, "sweep": ()} | arguments))


@pytest.fixture(scope="module")
def trained():
    """A classifier with some training, and its data."""
    seed_everything(0)
    data = DigitsHazard(seed=0, batch_size=50)
    module = Classifier(n_classes=4, n_features=64, label_groups=data.label_groups, class_names=data.class_names)
    Trainer(
        accelerator="cpu", max_epochs=20, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(module, datamodule=data)  # fmt: skip
    return module, data


def probabilities(module, data, split):
    fields = data.split(split).fields
    with torch.no_grad():
        return module.eval()(fields["image"]).double().softmax(-1), fields["label"]


def test_every_arm_equals_the_decision_object_on_the_same_probabilities(trained, tmp_path):
    module, data = trained
    (metrics,) = trainer(tmp_path, conformal()).test(module, datamodule=data, verbose=False)
    p, labels = probabilities(module, data, "test")
    loss = torch.tensor(LOSS, dtype=torch.float64)
    for name, arm in ARMS.items():
        decision = ConformalDecision(LOSS, 0.1, arm.score, arm.rule, randomized=arm.randomized)
        sets, actions = decision.fit(*probabilities(module, data, "calibration")).decide(p)
        assert metrics[f"test/{name}_loss"] == pytest.approx(loss[labels, actions].mean().item(), abs=1e-6), name
        if name != "best":
            covered = sets.gather(1, labels[:, None]).double().mean().item()
            assert metrics[f"test/{name}_coverage"] == pytest.approx(covered, abs=1e-6), name
            assert metrics[f"test/{name}_size"] == pytest.approx(sets.sum(1).double().mean().item(), abs=1e-6), name
    assert "test/best_coverage" not in metrics


def test_the_claim_holds_on_this_classifier(trained, tmp_path):
    module, data = trained
    pairs = [("condition A", 0), ("condition B", "action 0"), (3, 0)]
    (metrics,) = trainer(tmp_path, conformal(critical=pairs)).test(module, datamodule=data, verbose=False)
    assert metrics["test/rocp_loss"] < metrics["test/rac_loss"]
    assert metrics["test/rocp_critical"] < metrics["test/rac_critical"]
    assert metrics["test/rocp_coverage"] > 0.85


@pytest.mark.parametrize("batch_size", [1, 7, 64])
def test_sets_do_not_depend_on_the_batch_size(trained, tmp_path, batch_size):
    module, _ = trained
    found = []
    for size in (50, batch_size):
        data = DigitsHazard(seed=0, batch_size=size, n_test=90)
        (metrics,) = trainer(tmp_path, conformal()).test(module, datamodule=data, verbose=False)
        found.append({name: value for name, value in metrics.items() if "_size" in name or "_coverage" in name})
    assert found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        assert found[1][name] == pytest.approx(value, nan_ok=True), name


def test_the_state_of_a_checkpoint_is_that_of_its_own_weights(tmp_path):
    seed_everything(0)
    data = DigitsHazard(seed=0, batch_size=50)
    module = Classifier(n_classes=4, n_features=64, label_groups=data.label_groups)
    best, last = RunCheckpoint(tmp_path, "best", "val/accuracy", "max"), RunCheckpoint(tmp_path, "last")
    trainer(tmp_path, conformal(), best, last, max_epochs=4).fit(module, datamodule=data)
    for name in ("best", "last"):
        checkpoint = torch.load(tmp_path / f"{name}.ckpt", weights_only=True)
        state = checkpoint["callbacks"]["ConformalCalibration"]
        module.load_state_dict(checkpoint["state_dict"])
        p, labels = probabilities(module, data, "calibration")
        assert torch.equal(state["labels"], labels)
        torch.testing.assert_close(state["logits"].double().softmax(-1), p, atol=1e-6, rtol=0)


def test_keeping_the_state_does_not_change_the_training(tmp_path):
    weights = []
    for callbacks in ([], [conformal()], [conformal(store=False)]):
        seed_everything(0)
        data = DigitsHazard(seed=0, batch_size=50)
        module = Classifier(n_classes=4, n_features=64, dropout=0.3)
        folder = tmp_path / str(len(weights))
        trainer(folder, *callbacks, RunCheckpoint(folder, "last"), max_epochs=2).fit(module, datamodule=data)
        assert module.training
        weights.append(module.network[1].weight.detach())
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[0], weights[2])


def test_without_store_the_checkpoint_holds_no_calibration(tmp_path):
    data = DigitsHazard(seed=0)
    module = Classifier(n_classes=4, n_features=64)
    trainer(tmp_path, conformal(store=False), RunCheckpoint(tmp_path, "last")).fit(module, datamodule=data)
    callbacks = torch.load(tmp_path / "last.ckpt", weights_only=True)["callbacks"]
    assert not callbacks.get("ConformalCalibration")


class NoCalibration(LightningDataModule):
    """Test data only: the calibration has to come from the checkpoint."""

    def __init__(self, data):
        super().__init__()
        self.data = data

    def test_dataloader(self):
        return self.data.test_dataloader()


def test_a_loaded_checkpoint_is_tested_without_calibration_data(tmp_path):
    seed_everything(0)
    data = DigitsHazard(seed=0, batch_size=50)
    module = Classifier(n_classes=4, n_features=64, label_groups=data.label_groups)
    trainer(tmp_path, conformal(), RunCheckpoint(tmp_path, "last")).fit(module, datamodule=data)
    (with_data,) = trainer(tmp_path, conformal()).test(module, datamodule=data, verbose=False)
    (without,) = trainer(tmp_path, conformal()).test(
        module, datamodule=NoCalibration(data), ckpt_path=tmp_path / "last.ckpt", verbose=False, weights_only=True
    )
    assert without == with_data
    with pytest.raises(ValueError, match="there are no calibration data: give the data module"):
        trainer(tmp_path, conformal()).test(module, datamodule=NoCalibration(data), verbose=False)


def test_a_loss_matrix_of_the_wrong_size_stops_the_fit_at_its_first_checkpoint(tmp_path):
    module, wrong = Classifier(n_classes=4, n_features=64), ConformalCalibration([[0, 1], [1, 0]])
    with pytest.raises(ValueError, match=r"shape \(2, 2\), expected \(4, actions\)"):
        trainer(tmp_path, wrong, RunCheckpoint(tmp_path, "last")).fit(module, datamodule=DigitsHazard())


def test_arms_in_python_may_be_the_mappings_that_they_are_in_yaml():
    callback = conformal(arms={"lac": {"score": "lac", "rule": "maxmin"}, "rocp": Arm()})
    assert callback.arms == {"lac": Arm("lac", "maxmin"), "rocp": Arm()}


def test_other_data_are_calibrated_on_when_asked_for(tmp_path):
    seed_everything(0)
    data, noisy = DigitsHazard(seed=0), DigitsHazard(seed=0, noise=9.0)
    module = Classifier(n_classes=4, n_features=64, label_groups=data.label_groups)
    trainer(tmp_path, conformal(), RunCheckpoint(tmp_path, "last")).fit(module, datamodule=data)
    for recalibrate in (False, True):
        callback = conformal(recalibrate=recalibrate)
        trainer(tmp_path, callback).test(module, datamodule=noisy, ckpt_path=tmp_path / "last.ckpt", verbose=False)
        p, _ = probabilities(module, noisy if recalibrate else data, "calibration")
        torch.testing.assert_close(callback.state_dict()["logits"].double().softmax(-1), p, atol=1e-6, rtol=0)


def test_training_on_makes_a_calibration_stale(tmp_path):
    seed_everything(0)
    data = DigitsHazard(seed=0, batch_size=50)
    module, callback = Classifier(n_classes=4, n_features=64), conformal()
    run = trainer(tmp_path, callback, max_epochs=1)
    run.test(module, datamodule=data, verbose=False)
    before = callback.state_dict()["logits"]
    run.fit(module, datamodule=data)
    run.test(module, datamodule=data, verbose=False)
    assert not torch.equal(callback.state_dict()["logits"], before)


def test_a_callback_that_is_used_again_forgets_the_other_model(tmp_path):
    used, fresh = ConformalCalibration(alpha=0.2), ConformalCalibration(alpha=0.2)
    trainer(tmp_path, used).test(Stranger(lambda x: 8 * x), datamodule=PairData(), verbose=False)
    module = Stranger(lambda x: x)
    module.head.weight.data *= 0.5
    found = [
        trainer(tmp_path, callback).test(module, datamodule=PairData(), verbose=False) for callback in (used, fresh)
    ]
    assert found[0] == found[1]


def test_averaged_weights_are_tested_with_their_own_calibration(tmp_path):
    seed_everything(0)
    data = DigitsHazard(seed=0, batch_size=50)
    module = Classifier(n_classes=4, n_features=64, optimizer=partial(torch.optim.Adam, lr=0.05))
    average = EMAWeightAveraging(decay=0.9)
    trainer(tmp_path, average, conformal(), RunCheckpoint(tmp_path, "last"), max_epochs=2).fit(module, datamodule=data)
    fresh = Classifier(n_classes=4, n_features=64)
    callback = conformal()
    trainer(tmp_path, callback).test(fresh, datamodule=data, ckpt_path=tmp_path / "last.ckpt", verbose=False)
    p, _ = probabilities(fresh, data, "calibration")
    torch.testing.assert_close(callback.state_dict()["logits"].double().softmax(-1), p, atol=1e-6, rtol=0)


def test_validation_data_take_the_place_of_missing_calibration_data_with_a_warning(trained, tmp_path, caplog):
    module, data = trained

    class Plain(NoCalibration):
        def val_dataloader(self):
            return self.data.val_dataloader()

    caplog.set_level(logging.WARNING, logger="fulgurite")
    logging.getLogger("fulgurite").propagate = True
    callback = conformal()
    trainer(tmp_path, callback).test(module, datamodule=Plain(data), verbose=False)
    assert "calibrating on the validation data" in caplog.text
    assert torch.equal(callback.state_dict()["labels"], data.split("val").fields["label"])


# ---- strangers


class Pairs(Dataset):
    def __init__(self, n, seed):
        generator = torch.Generator().manual_seed(seed)
        self.y = torch.randint(3, (n,), generator=generator)
        self.x = torch.eye(3)[self.y] + 0.7 * torch.randn(n, 3, generator=generator)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


class PairData(LightningDataModule):
    def calibration_dataloader(self):
        return DataLoader(Pairs(80, 1), batch_size=16, shuffle=True)

    def test_dataloader(self):
        return DataLoader(Pairs(70, 2), batch_size=16)

    def predict_dataloader(self):
        return self.test_dataloader()


class Stranger(LightningModule):
    """A classifier of somebody else's: tuples as batches, and any kind of output."""

    def __init__(self, wrap):
        super().__init__()
        self.head = nn.Linear(3, 3)
        nn.init.eye_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.wrap = wrap

    def forward(self, x):
        return self.wrap(4 * self.head(x))

    def test_step(self, batch, batch_idx):
        return None

    def predict_step(self, batch, batch_idx):
        return {"logits": 4 * self.head(batch[0])}


WRAPS = {
    "tensor": (lambda logits: logits, {}),
    "dict": (lambda logits: {"scores": logits}, {"output": "scores"}),
    "tuple": (lambda logits: (logits, None), {}),
    "attribute": (lambda logits: SimpleNamespace(logits=logits), {}),
    "call": (lambda _: "nothing of use", {"call": "head"}),
}


@pytest.mark.parametrize(("wrap", "arguments"), WRAPS.values(), ids=WRAPS)
def test_it_works_on_a_strangers_classifier_whatever_it_returns(tmp_path, wrap, arguments):
    callback = ConformalCalibration(alpha=0.2, arms={"lac": Arm("lac", "maxmin")}, **arguments)
    (metrics,) = trainer(tmp_path, callback).test(Stranger(wrap), datamodule=PairData(), verbose=False)
    assert 0.7 < metrics["test/lac_coverage"] <= 1
    data = Pairs(80, 1)
    expected = data.x if arguments.get("call") else 4 * data.x
    assert torch.allclose(callback.state_dict()["logits"], expected), "the order is the data set's, not the loader's"


def test_logits_that_cannot_be_found_are_said_to_be_missing(tmp_path):
    with pytest.raises(
        ValueError, match=r"the output of Stranger is a str without 'logits'; name the key or attribute"
    ):
        trainer(tmp_path, conformal(loss_matrix=None, arms=None)).test(
            Stranger(lambda _: "text"), datamodule=PairData(), verbose=False
        )


def test_an_unknown_attribute_to_call_is_named(tmp_path):
    callback = conformal(loss_matrix=None, arms=None, call="tail")
    with pytest.raises(ValueError, match="call is 'tail', but Stranger has no attribute 'tail'"):
        trainer(tmp_path, callback).test(Stranger(lambda x: x), datamodule=PairData(), verbose=False)


def test_logits_that_are_not_finite_stop_the_test(tmp_path):
    with pytest.raises(ValueError, match="logits are not finite"):
        trainer(tmp_path, conformal(loss_matrix=None, arms=None)).test(
            Stranger(lambda x: x * float("nan")), datamodule=PairData(), verbose=False
        )


def test_predictions_gain_sets_and_actions(tmp_path):
    loss = [[0, 1], [5, 1], [5, 0]]
    callback = ConformalCalibration(loss, alpha=0.2, arms={"rocp": Arm(), "best": Arm(rule="best_response")})
    outputs = trainer(tmp_path, callback).predict(Stranger(lambda x: x), datamodule=PairData())
    joined = {name: torch.cat([output[name] for output in outputs]) for name in outputs[0]}
    assert set(joined) == {"logits", "rocp_set", "rocp_action", "best_action"}
    calibration, test = Pairs(80, 1), Pairs(70, 2)
    decision = ConformalDecision(loss, 0.2).fit((4 * calibration.x).double().softmax(-1), calibration.y)
    sets, actions = decision.decide((4 * test.x).double().softmax(-1))
    assert torch.equal(joined["rocp_set"], sets)
    assert torch.equal(joined["rocp_action"], actions)


class Sampled(PairData):
    """A calibration loader that takes a part of its data set by a sampler."""

    def __init__(self, loader):
        super().__init__()
        self.loader = loader

    def calibration_dataloader(self):
        return self.loader


def test_a_subset_sampler_of_the_calibration_loader_is_respected(tmp_path):
    chosen = [70, 3, 41, 8]
    callback = ConformalCalibration(alpha=0.2)
    loader = DataLoader(Pairs(80, 1), batch_size=3, sampler=SubsetRandomSampler(chosen))
    before = torch.get_rng_state()
    assert fixed_indices(loader) == sorted(chosen)
    assert torch.equal(torch.get_rng_state(), before), "nothing is drawn from the sampler"
    trainer(tmp_path, callback).test(Stranger(lambda x: x), datamodule=Sampled([loader]), verbose=False)
    assert callback.state_dict()["labels"].tolist() == Pairs(80, 1).y[sorted(chosen)].tolist()


class Stream(IterableDataset):
    def __iter__(self):
        return iter([])


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (
            DataLoader(Pairs(9, 1), sampler=WeightedRandomSampler([1.0], 9)),
            "has a WeightedRandomSampler; give it a",
        ),
        (DataLoader(Stream()), "needs a data set with a length"),
        (DataLoader(Pairs(9, 1), batch_size=None), "needs a data set with a length and a batch size"),
        (DataLoader(Pairs(0, 1), batch_size=2), "the calibration set is empty"),
        ([DataLoader(Pairs(9, 1)), DataLoader(Pairs(9, 1))], "gives a list; give one DataLoader"),
    ],
)
def test_calibration_loaders_that_cannot_be_passed_in_order_are_refused(tmp_path, loader, message):
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, ConformalCalibration(alpha=0.2)).test(
            Stranger(lambda x: x), datamodule=Sampled(loader), verbose=False
        )


@pytest.mark.parametrize(
    "step",
    [
        lambda self, batch: self(batch[0]).softmax(-1),  # a bare tensor may be anything
        lambda self, batch: {"loss": self(batch[0]).mean(), "scores": self(batch[0])},
        lambda self, batch: {"logits": self(batch[0])},
    ],
)
def test_what_a_test_step_returns_is_taken_for_logits_only_under_their_name(tmp_path, step):
    class Steps(Stranger):
        def test_step(self, batch, batch_idx):
            return step(self, batch)

    found = [
        trainer(tmp_path, ConformalCalibration(alpha=0.2)).test(module, datamodule=PairData(), verbose=False)
        for module in (Stranger(lambda x: x), Steps(lambda x: x))
    ]
    assert found[0] == found[1]


def test_rows_of_logits_must_be_those_of_the_batch(tmp_path):
    class Doubled(Stranger):
        def test_step(self, batch, batch_idx):
            return {"logits": self(batch[0]).repeat(2, 1)}

    with pytest.raises(ValueError, match="the test step gives 32 rows of logits for 16 labels"):
        trainer(tmp_path, ConformalCalibration(alpha=0.2)).test(
            Doubled(lambda x: x), datamodule=PairData(), verbose=False
        )


@pytest.mark.parametrize("wrap", [lambda x: x[:, :1], lambda x: x[:, :, None], lambda x: x[:, 0]])
def test_logits_of_another_shape_are_refused_with_their_shape(tmp_path, wrap):
    with pytest.raises(ValueError, match=r"the logits have shape .*, expected \(samples, labels\)"):
        trainer(tmp_path, ConformalCalibration(alpha=0.2)).test(Stranger(wrap), datamodule=PairData(), verbose=False)


def test_transfer_hooks_act_on_calibration_batches_too(tmp_path):
    class Hooked(PairData):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            return 3 * batch[0], batch[1]

    callback = ConformalCalibration(alpha=0.2)
    trainer(tmp_path, callback).test(Stranger(lambda x: x), datamodule=Hooked(), verbose=False)
    assert torch.allclose(callback.state_dict()["logits"], 12 * Pairs(80, 1).x)


def test_rows_of_a_named_loss_matrix_follow_the_classifiers_labels(tmp_path):
    (tmp_path / "losses.csv").write_text("label,wait,treat\nsick,9,1\nwell,0,2\nold,5,5\n")
    module = Stranger(lambda x: x)
    module.class_names = ["well", "sick", "old"]
    callback = ConformalCalibration(str(tmp_path / "losses.csv"), alpha=0.2)
    trainer(tmp_path, callback).test(module, datamodule=PairData(), verbose=False)
    assert callback.loss.tolist() == [[0, 2], [9, 1], [5, 5]]
    module.class_names = ["a", "b", "c"]
    with pytest.raises(ValueError, match=r"the loss matrix's file has the labels \['sick', 'well', 'old'\]"):
        trainer(tmp_path, ConformalCalibration(str(tmp_path / "losses.csv"))).test(
            module, datamodule=PairData(), verbose=False
        )


def test_labels_that_are_no_whole_numbers_are_refused(tmp_path):
    class Fractions(PairData):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            return batch[0], batch[1] + 0.6

    with pytest.raises(ValueError, match="the labels are no whole numbers"):
        trainer(tmp_path, ConformalCalibration(alpha=0.2)).test(
            Stranger(lambda x: x), datamodule=Fractions(), verbose=False
        )


def test_sets_that_are_all_empty_are_reported(tmp_path):
    callback = ConformalCalibration(alpha=0.99, arms={"lac": Arm("lac", "maxmin")})
    module = Stranger(lambda x: 8 * x)
    (metrics,) = trainer(tmp_path, callback, limit_test_batches=1).test(module, datamodule=PairData(), verbose=False)
    assert metrics["test/lac_size"] < 1


@pytest.mark.parametrize(
    ("arms", "message"),
    [
        ("{x: {score: apz}}", "'apz' is none of rocp, rac, lac, aps, raps, socop; did you mean"),
        ("{x: {scor: aps}}", "Arm has no argument 'scor'; did you mean score?"),
        ("{x: {alpha: much}}", "expected float, got much"),
    ],
)
def test_a_wrong_arm_on_the_command_line_is_named(fulgurite_cli, arms, message):
    outcome = fulgurite_cli("fit", "--config", "rocp/cpu", "--trainer.callbacks.arms", arms)
    assert outcome.code == 2
    assert message in outcome.err
    assert outcome.err.startswith("error: command line, trainer.callbacks.arms"), outcome.err


# ---- what is written


def test_the_table_is_written_as_csv_text_and_metrics(trained, tmp_path):
    module, data = trained
    logger = TensorBoardLogger(tmp_path, name="", version="events")
    callback = conformal(critical=[(1, 0)], sweep=(0.05, 0.2))
    (metrics,) = trainer(tmp_path, callback, logger=logger).test(module, datamodule=data, verbose=False)
    rows = {row["arm"]: row for row in csv.DictReader((tmp_path / "conformal.csv").open())}
    assert list(rows) == list(ARMS)
    for name, row in rows.items():
        for column, value in row.items():
            if column != "arm" and value:
                assert float(value) == pytest.approx(metrics[f"test/{name}_{column}"], rel=1e-4, nan_ok=True)
    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    assert "test/conformal/text_summary" in events.Tags()["tensors"]
    images = {"decisions", "loss_against_alpha", "coverage_curve", "hulls"}
    assert {f"test/{name}" for name in images} <= set(events.Tags()["images"])
    assert {f"test_{name}.png" for name in images} <= {path.name for path in (tmp_path / "figures").iterdir()}


def test_two_callbacks_stand_side_by_side_under_their_names(trained, tmp_path):
    module, data = trained
    strict, loose = conformal(name="strict", alpha=0.02), conformal(name="loose", alpha=0.3)
    (metrics,) = trainer(tmp_path, strict, loose).test(module, datamodule=data, verbose=False)
    assert metrics["test/strict_rocp_coverage"] > metrics["test/loose_rocp_coverage"]
    assert (tmp_path / "strict_conformal.csv").exists()
    assert (tmp_path / "loose_conformal.csv").exists()


def test_the_temperature_divides_the_logits(trained, tmp_path):
    module, data = trained
    (metrics,) = trainer(tmp_path, conformal(temperature=3.0)).test(module, datamodule=data, verbose=False)

    def cooled(split):
        p, labels = probabilities(module, data, split)
        return (p.log() / 3).softmax(-1), labels

    p, labels = cooled("test")
    actions = ConformalDecision(LOSS, 0.1).fit(*cooled("calibration")).predict(p)
    expected = torch.tensor(LOSS).double()[labels, actions].mean().item()
    assert metrics["test/rocp_loss"] == pytest.approx(expected, abs=1e-6)


# ---- ranks


def test_samples_of_several_ranks_come_in_order_and_once():
    single = SimpleNamespace(world_size=1)
    positions = torch.tensor([4, 0, 2, 2, 5, 1, 3])
    logits, labels = gather_in_order(single, positions, positions[:, None].float(), 10 * positions, limit=5)
    assert labels.tolist() == [0, 10, 20, 30, 40]
    assert logits.flatten().tolist() == [0, 1, 2, 3, 4]


@pytest.mark.slow
def test_two_processes_give_the_state_and_the_sets_of_one(fresh_process, fulgurite_cli):
    """One sample a batch: the scores of a sample are the same bits on any number of ranks."""
    base = ("--config", "rocp/cpu", "--trainer.max_epochs", "1", "--trainer.check_val_every_n_epoch", "1")
    odd = ("--data.n_calibration", "101", "--data.n_test", "66", "--data.batch_size", "1")
    few = ("--trainer.limit_train_batches", "20", "--trainer.limit_val_batches", "5")
    assert fulgurite_cli("fit", *base, *odd, *few).code == 0
    checkpoint = torch.load("runs/rocp/cpu/latest/checkpoints/last.ckpt", weights_only=True)
    checkpoint["callbacks"].pop("ConformalCalibration")  # so that both have to calibrate
    torch.save(checkpoint, "without.ckpt")
    two = ("--trainer.devices", "2", "--trainer.strategy", "ddp", "--trainer.accelerator", "cpu")
    for command in ("test", "predict"):
        arguments = (command, "--ckpt_path", "without.ckpt", "--trainer.default_root_dir")
        assert fulgurite_cli(*arguments, "one").code == 0
        outcome = fresh_process(*arguments, "two", *two)
        assert outcome.code == 0, outcome.err

    one, two = (next(Path(name).rglob("conformal.csv")).read_text() for name in ("one", "two"))
    assert one == two
    one, two = (np.load(next(Path(name).rglob("predictions.npz"))) for name in ("one", "two"))
    assert len(one["index"]) == 66
    assert set(one.files) == set(two.files) >= {"index", "rocp_set", "rocp_action", "aps_set", "probabilities"}
    for name in one.files:
        assert np.array_equal(one[name], two[name]), name


@pytest.mark.slow
def test_a_fit_then_a_test_in_a_new_process_uses_the_calibration_of_the_checkpoint(fresh_process, fulgurite_cli):
    base = ("--config", "rocp/cpu", "--trainer.max_epochs", "2", "--trainer.check_val_every_n_epoch", "1")
    assert fulgurite_cli("fit", *base).code == 0
    assert fulgurite_cli("test", "--config", "rocp/cpu", "--ckpt_path", "last").code == 0
    assert fresh_process("test", "--config", "rocp/cpu", "--ckpt_path", "last").code == 0
    tables = [path.read_text() for path in Path("runs/rocp/cpu/latest/test").rglob("conformal.csv")]
    assert len(tables) == 2
    assert tables[0] == tables[1]


# ---- arguments


def test_a_loss_matrix_comes_from_a_file_with_names(tmp_path):
    (tmp_path / "named.csv").write_text("condition,wait,treat\nwell,0,1\nsick,9,0.5\n")
    (tmp_path / "plain.csv").write_text("0,1\n9,0.5\n")
    np.save(tmp_path / "plain.npy", np.array([[0, 1], [9, 0.5]]))
    expected = torch.tensor([[0, 1], [9, 0.5]], dtype=torch.float64)
    matrix, labels, actions = read_loss_matrix(tmp_path / "named.csv")
    assert torch.equal(matrix, expected)
    assert (labels, actions) == (["well", "sick"], ["wait", "treat"])
    for name in ("plain.csv", "plain.npy"):
        matrix, labels, actions = read_loss_matrix(tmp_path / name)
        assert torch.equal(matrix, expected)
        assert labels is actions is None
    callback = ConformalCalibration(str(tmp_path / "named.csv"), critical=[("sick", "wait")])
    assert callback.action_names == ["wait", "treat"]


@pytest.mark.parametrize("text", ["", "a,b\n", "1,2\n3\n", "1,x\n2,3\n", "name,a\nrow,x\n"])
def test_a_loss_matrix_that_is_no_table_is_refused(tmp_path, text):
    (tmp_path / "bad.csv").write_text(text)
    with pytest.raises(ValueError, match=r"bad.csv': give a table of numbers"):
        read_loss_matrix(tmp_path / "bad.csv")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"alpha": 0.0}, "alpha is 0.0"),
        ({"alpha": float("nan")}, "alpha is nan"),
        ({"sweep": [0.1, 1.0]}, "alpha is 1.0"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"loss_matrix": [[0, -1], [1, 0]]}, "losses are at least 0"),
        ({"loss_matrix": [0, 1]}, "rows are true labels, columns are actions"),
        ({"loss_matrix": None, "arms": {"x": Arm()}}, "score 'rocp' needs a loss matrix"),
        ({"arms": {"a/b": Arm()}}, "arm 'a/b': give a name of letters"),
        ({"arms": {"x": Arm("lac", "plug_in")}}, "rule 'plug_in' is ROCP's or RAC's own action"),
        ({"arms": {"x": Arm(alpha=2.0)}}, "alpha is 2.0"),
        ({"arms": {"x": Arm(alpha=0)}}, "alpha is 0"),
        ({"quantiles": [95]}, r"quantiles are \[95\]"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        conformal(**arguments)


def test_a_missing_file_of_losses_is_named():
    with pytest.raises(FileNotFoundError, match=r"nowhere.csv'\: there is no such file"):
        ConformalCalibration("nowhere.csv")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"loss_matrix": [[0, 1], [1, 0]]}, r"shape \(2, 2\), expected \(4, actions\)"),
        ({"label_names": ["a"]}, "label_names has 1 names, 4 are needed"),
        ({"action_names": ["a"]}, "action_names has 1 names, 4 are needed"),
        ({"critical": [("plague", 0)]}, "critical names the label 'plague'; known are benign"),
        ({"critical": [(9, 0)]}, r"critical pair \(9, 0\) lies outside 4 labels"),
        ({"inputs": "picture"}, "the batch has no field 'picture', it has image, label"),
        ({"labels": "target"}, "the batch has no field 'target'"),
    ],
)
def test_what_does_not_fit_the_data_is_refused_at_the_test(trained, tmp_path, arguments, message):
    module, data = trained
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, conformal(**arguments)).test(module, datamodule=data, verbose=False)
