"""The container of loss terms: registration, sums, state, names."""

import pytest
import torch
from torch import nn

from fulgurite.modules import LossContext, LossTerm, LossTerms, loss_terms


class Weighted(LossTerm):
    name = "weighted"

    def __init__(self, value=2.0):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(value))

    def forward(self, context):
        return {"square": self.scale * context.batch.square().sum(), "one": torch.ones(())}


class Fixed(LossTerm):
    name = "fixed"

    def __init__(self, result):
        super().__init__()
        self.result = result

    def forward(self, context):
        return self.result


def context():
    return LossContext(torch.tensor([1.0, 2.0]))


def test_parts_are_summed_to_the_loss_of_their_player_and_logged():
    terms = LossTerms("critic", "actor")
    terms.add("critic", Weighted())
    terms.add("critic", Fixed({"a": torch.tensor([0.5])}))
    logged = {}
    loss = terms.add_to("critic", torch.tensor(1.0), context(), logged.__setitem__)
    assert loss.item() == 1 + 2 * 5 + 1 + 0.5
    assert {name: value.item() for name, value in logged.items()} == {
        "train/weighted_square": 10.0,
        "train/weighted_one": 1.0,
        "train/fixed_a": 0.5,
    }
    assert not any(value.requires_grad for value in logged.values())
    untouched = torch.tensor(1.0)
    assert terms.add_to("actor", untouched, context()) is untouched


def test_a_term_that_gives_nothing_changes_nothing():
    terms = LossTerms("model")
    terms.add("model", Fixed({}))
    untouched = torch.tensor(1.0)
    assert terms.add_to("model", untouched, context()) is untouched


def test_names_and_parameters_are_those_of_the_player():
    terms = LossTerms("critic", "actor")
    term = Weighted()
    terms.add("critic", term)
    terms.add("actor", Fixed({}))
    assert terms.names() == ["actor.fixed", "critic.weighted"]
    assert list(terms.parameters_of("critic")) == [term.scale]
    assert list(terms.parameters_of("actor")) == []
    terms.remove("critic", "weighted")
    assert terms.names() == ["actor.fixed"]


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (lambda terms: terms.add("critics", Weighted()), "no player 'critics', there are critic, actor"),
        (lambda terms: terms.add("critic", Weighted()), "has a term 'weighted' already"),
        (lambda terms: terms.remove("actor", "weighted"), "the actor has no term 'weighted', it has none"),
        (lambda terms: terms("nobody", context()), "no player 'nobody'"),
        (lambda _: LossTerms(), "needs the name of each loss"),
        (lambda _: LossTerms("a.b"), "'a.b' cannot name a player"),
        (lambda _: LossTerms("forward"), "'forward' cannot name a player"),
        (lambda terms: terms.add("actor", named("keys")), "'keys' cannot name a term"),
        (lambda terms: terms.add("actor", LossTerm()), "'' cannot name a term"),
    ],
)
def test_what_cannot_be_registered_is_refused(action, message):
    terms = LossTerms("critic", "actor")
    terms.add("critic", Weighted())
    with pytest.raises(ValueError, match=message):
        action(terms)


def named(name):
    term = Fixed({})
    term.name = name
    return term


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (torch.ones(()), "returned a Tensor; return a dict"),
        ({"a": torch.ones(2)}, r"part 'a' of term 'fixed' is no scalar tensor but shape \(2,\)"),
        ({"a": 1.0}, "is no scalar tensor but float"),
    ],
)
def test_a_part_is_a_scalar_tensor(result, message):
    terms = LossTerms("model")
    terms.add("model", Fixed(result))
    with pytest.raises(TypeError, match=message):
        terms("model", context())


class Host(nn.Module):
    def __init__(self):
        super().__init__()
        self.network = nn.Linear(2, 1)
        self.loss_terms = LossTerms("critic", "actor")


def test_the_state_of_a_term_is_saved_restored_and_left_out_where_it_is_not(monkeypatch):
    trained = Host()
    trained.loss_terms.add("critic", Weighted(7.0))
    state = trained.state_dict()
    assert "loss_terms.critic.weighted.scale" in state

    same = Host()
    same.loss_terms.add("critic", Weighted(1.0))
    same.load_state_dict(state)
    assert same.loss_terms.get_submodule("critic.weighted").scale.item() == 7.0

    without = Host()
    said = []
    monkeypatch.setattr(loss_terms.log, "info", lambda text, *values: said.append(text % values))
    without.load_state_dict(state)
    assert torch.equal(without.network.weight, trained.network.weight)
    assert said == [
        "the checkpoint's state of the loss terms ['critic.weighted'] is left out: there is no such term here"
    ]
    assert len(state) == 3, "the caller's dict is left as it was"


def test_every_other_key_stays_strict():
    host = Host()
    state = host.state_dict()
    with pytest.raises(RuntimeError, match=r"loss_terms\.stranger"):
        host.load_state_dict({**state, "loss_terms.stranger.term.scale": torch.ones(())})
    with_term = Host()
    with_term.loss_terms.add("critic", Weighted())
    with pytest.raises(RuntimeError, match="it was trained without them"):
        with_term.load_state_dict(state)
