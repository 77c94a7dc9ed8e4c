"""A data set of tensors in memory."""

from collections.abc import Mapping, Sequence

from torch import Tensor, as_tensor
from torch.utils.data import Dataset


class TensorFields(Dataset[dict[str, Tensor]]):
    """Named tensors of equal length; a batch is taken by one indexing operation per field, not sample by sample.

    Args:
        fields: name -> tensor (N, ...).

    Raises:
        ValueError: there are no fields, or their lengths differ.
    """

    def __init__(self, fields: Mapping[str, Tensor]) -> None:
        lengths = {name: len(tensor) for name, tensor in fields.items()}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"the fields of a data set need one common length, got {lengths}")
        self.fields = dict(fields)

    def __len__(self) -> int:
        return len(next(iter(self.fields.values())))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: tensor[index] for name, tensor in self.fields.items()}

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Tensor]:
        chosen = as_tensor(indices)
        return {name: tensor[chosen] for name, tensor in self.fields.items()}
