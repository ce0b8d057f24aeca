"""The contract's small network in PyTorch."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class TorchCase:
    """Input 5, hidden 7, output 3, float32, Adam; the user's objects are real and have been trained for a step."""

    def __init__(self, rows: int = 4) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
        self.batch = (torch.randn(rows, 5), torch.randn(rows, 3))
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.loss(self.model, self.batch).backward()
        self.optimizer.step()

    @staticmethod
    def loss(model: Any, batch: Any) -> Any:
        data, target = batch
        return F.mse_loss(model(data), target)

    @staticmethod
    def broken_loss(model: Any, batch: Any) -> Any:
        raise KeyError("broken on purpose")

    def numbers(self) -> list[bytes]:
        """Every number of the user's, as bytes."""
        tensors = [*self.model.parameters(), *(p.grad for p in self.model.parameters()), *self.batch]
        for state in self.optimizer.state.values():
            tensors.extend(state.values())
        return [tensor.detach().numpy().tobytes() for tensor in tensors]

    def identities(self) -> list[int]:
        """Which objects the user's are."""
        return [id(part) for p in self.model.parameters() for part in (p, p.grad)]
