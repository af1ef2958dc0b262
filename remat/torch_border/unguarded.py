"""What decides a captured step although dynamo's guards do not look at it.

Supported: torch 2.11 to 2.15; each name below was checked with the version beside it.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import nn

# torch 2.11 does not capture again when a parameter is frozen or trained again
_IS_TRAINING_GUARDED = torch.__version__ >= "2.12"


def unguarded(module: nn.Module) -> Hashable:
    """Returns a key of what else a captured step of `module` depends on.

    These are the kernels allowed for attention, which is chosen while a step is captured
    (`_get_sdp_priority_order`, 2.13), and with torch 2.11 which parameters are trained.
    """
    of_attention = (
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        torch.backends.cuda.cudnn_sdp_enabled(),
        *torch._C._get_sdp_priority_order(),
    )
    if _IS_TRAINING_GUARDED:
        return of_attention
    return of_attention, tuple(parameter.requires_grad for parameter in module.parameters())
