"""One critic update of TD3: plain, with PAVE's terms by differentiating a gradient, and with them in closed form.

An update is forward, backward and Adam's step of both critics on a given target, one thread, the draws included.

Run: python benchmarks/pave_update.py [--quick]
"""

import argparse
from collections.abc import Callable

import torch
from harness import describe_machine, measure, print_comparison
from torch import Tensor

from fulgurite.modules.pave.functional import draw_noise, draw_rademacher, pave_losses
from fulgurite.modules.pave.functional_mlp import pave_losses_mlp
from fulgurite.modules.pave.networks import TwinCritic

SIZES = {  # name: observation, action, hidden layers, batch
    "Pendulum, [64, 64], B = 128": (3, 1, (64, 64), 128),
    "Walker2d, [400, 300], B = 256": (17, 6, (400, 300), 256),
}


def updates(kind: str, size: str, n: int) -> Callable[[], object]:
    """``n`` critic updates of a kind: plain, autograd or closed."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    n_observations, n_actions, hidden, batch = SIZES[size]
    critic = TwinCritic(n_observations, n_actions, hidden)
    optimizer = torch.optim.Adam(critic.parameters(), 1e-3)
    s, s_next = torch.randn(2, batch, n_observations)
    a, target = torch.rand(batch, n_actions) * 2 - 1, torch.randn(batch)

    def terms() -> dict[str, Tensor]:
        if kind == "plain":
            return {}
        eps, v = draw_noise(s, 0.01), draw_rademacher(a)
        if kind == "closed":
            return pave_losses_mlp(critic.weights(), critic.activation, s, a, s_next, eps=eps, v=v)
        return pave_losses(critic, s, a, s_next, eps=eps, v=v)

    def run() -> None:
        for _ in range(n):
            loss = (critic(s, a) - target).square().mean(1).sum()
            for name, value in terms().items():
                loss = loss + {"mpr": 0.1, "vfc": 0.1, "curv": 0.01}[name] * value
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return run


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the updates, three times each")
    quick = parser.parse_args().quick
    print(describe_machine())
    for size, n in zip(SIZES, (20, 5) if quick else (200, 50), strict=True):
        kinds = ("plain", "autograd", "closed")
        plain, autograd, closed = measure([(updates, (kind, size, n)) for kind in kinds], 3 if quick else 15)
        print_comparison(f"{size}: autograd", autograd, plain, "plain")
        print_comparison(f"{size}: closed form", closed, plain, "plain")
        print_comparison(f"{size}: closed form", closed, autograd, "autograd")


if __name__ == "__main__":
    main()
