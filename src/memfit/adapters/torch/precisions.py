"""The dtypes behind the names of precisions: those of weights, and those of autocast."""

import torch

WEIGHTS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
AUTOCAST = {"amp-bf16": torch.bfloat16, "amp-fp16": torch.float16}
