"""The classifiers: a perceptron, or any timm backbone by its name."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch import nn


def perceptron(n_features: int, hidden: Sequence[int], n_classes: int, dropout: float) -> nn.Sequential:
    """A multi-layer perceptron over the flattened input (B, ...) -> (B, n_classes).

    Without a hidden layer it is softmax regression.

    Raises:
        ValueError: a width is below 1.
    """
    widths = [n_features, *hidden]
    if min(widths) < 1:
        raise ValueError(f"layer widths are {widths}; give at least 1 each")
    layers: list[nn.Module] = [nn.Flatten()]
    for width_in, width_out in pairwise(widths):
        layers += [nn.Linear(width_in, width_out), nn.ReLU(), nn.Dropout(dropout)]
    return nn.Sequential(*layers, nn.Linear(widths[-1], n_classes))


def timm_backbone(
    name: str, in_channels: int, n_classes: int, dropout: float, options: dict[str, Any] | None = None
) -> nn.Module:
    """A randomly initialised timm model (B, C, H, W) -> (B, n_classes).

    Raises:
        ValueError: timm knows no such model, or the model takes no such option.
    """
    import timm

    if not timm.is_model(name):
        near = ", ".join(timm.list_models(f"*{name.split('.')[0].split('_')[0]}*")[:3]) or "`timm.list_models()`"
        raise ValueError(f"backbone {name!r} is neither 'mlp' nor a timm model; near names: {near}")
    try:
        return timm.create_model(
            name, pretrained=False, in_chans=in_channels, num_classes=n_classes, drop_rate=dropout, **(options or {})
        )
    except TypeError as error:
        raise ValueError(f"timm model {name!r} refused backbone_options {options}: {error}") from error


def load_timm_weights(network: nn.Module, weights: str, in_channels: int) -> None:
    """Load pre-trained weights into a timm model; a head of another width keeps its random start.

    Args:
        network: a model of :func:`timm_backbone`.
        weights: ``"hub"`` for timm's published weights of this model (downloads; RGB filters are adapted to
            ``in_channels``), or the path of a ``.safetensors`` or ``.pth`` file that fits the network but for its head.
        in_channels: channels of the first convolution.

    Raises:
        ValueError: the file holds weights of another model.
        FileNotFoundError: there is no such file.
        OSError: the published weights cannot be fetched.
    """
    from timm.models import load_pretrained, load_state_dict

    published: Any = network.pretrained_cfg
    if weights == "hub":
        n_outputs: Any = network.num_classes
        try:
            load_pretrained(network, num_classes=n_outputs, in_chans=in_channels)
        except OSError as error:
            source = published["hf_hub_id"] or published["url"]
            raise OSError(
                f"weights 'hub' cannot be fetched from {source}: {str(error).splitlines()[0]}\n"
                "give the path of a weights file that you have, or leave weights out to start at random"
            ) from error
        return
    path = Path(weights).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"weights {weights!r}: there is no such file; give 'hub' or the path of a weights file")
    try:
        loaded = load_state_dict(str(path), use_ema=False, weights_only=True)
    except Exception as error:  # the readers raise a dozen types, by what the bytes happen to be
        raise ValueError(f"weights {weights!r} cannot be read as tensors: {str(error).splitlines()[0]}") from error
    own = network.state_dict()
    fitting = {name: value for name, value in loaded.items() if name in own and own[name].shape == value.shape}
    differing = [
        name for name in {**own, **loaded} if name not in fitting and not name.startswith(f"{published['classifier']}.")
    ]
    if differing:
        raise ValueError(
            f"weights {weights!r} are not of this model: {len(differing)} tensors differ, first {differing[0]!r}"
        )
    network.load_state_dict(fitting, strict=False)
