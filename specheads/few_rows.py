"""How wide a CPU pass of a few tokens is best made.

The matrix products of a pass over two or three tokens take longer than those of one over four, and an odd number of rows takes
as long as the next even one or longer (measured with MKL in single precision: 1.65, 2.1, 1.5, 1.75, 1.75, 2.0, 1.8 passes over
one token for 2 to 8). So such a pass is given columns that nothing looks at. Of a batch that goes on without drafts, three,
seven or eleven rows take longer than one row more does, so they are given one: a row that has ended.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .packing import is_packed

LEAST_TOKENS = 4  # fewer take longer, but for a single one
MANY_TOKENS = 16  # from here on it makes no difference


def fills_passes(model: PreTrainedModel) -> bool:
    """Whether a model's passes are better filled up: a dense one in single precision on a CPU, its weights not packed."""
    is_plain = model.dtype == torch.float32 and model.device.type == "cpu" and getattr(model, "hf_quantizer", None) is None
    # Each further token of a mixture of experts may read other experts.
    has_experts = any(getattr(module, "experts", None) is not None for module in model.modules())
    return is_plain and not has_experts and not is_packed(model)


def filled_columns(rows: int, columns: int) -> int:
    """How many columns a pass is to have that needs some for each of its rows; of several rows, a column more is too many."""
    while rows == 1 < columns < MANY_TOKENS and (columns < LEAST_TOKENS or columns % 2):
        columns += 1
    return columns


def filled_rows(rows: int, columns: int) -> int:
    """How many rows a pass is to have; a row has a column more to give only where it has no other."""
    return rows + 1 if columns == 1 and rows % LEAST_TOKENS == LEAST_TOKENS - 1 else rows


def filled(tokens: Tensor, depths: Tensor, visible: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A pass (`ModelRunner.extend`) with more columns: copies of the roots that nothing attends to but they themselves."""
    columns = filled_columns(*tokens.shape) - tokens.shape[1]
    if not columns:
        return tokens, depths, visible
    themselves = torch.eye(visible.shape[-1] + columns, dtype=torch.bool, device=visible.device)[-columns:]
    wider = nn.functional.pad(visible, (0, columns))
    return (
        torch.cat([tokens, tokens[:, :1].expand(-1, columns)], dim=1),
        torch.cat([depths, depths[:, :1].expand(-1, columns)], dim=1),
        torch.cat([wider, themselves.expand(len(tokens), -1, -1)], dim=1),
    )
