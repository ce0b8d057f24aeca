"""The contract's small network in PyTorch."""

from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import memfit
from tests.contract import oom_errors
from tests.contract.case import HIDDEN, INPUTS, OUTPUTS, TOO_MANY_ELEMENTS, Case, first_weights


class TorchCase(Case):
    out_of_memory = RuntimeError
    misspelt_job = ("torchvision:alexnt", "alexnet")

    def __init__(self, optimizer="adam", *, broken=False):
        super().__init__(optimizer, broken=broken)
        self.model = nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, OUTPUTS))
        with torch.no_grad():
            for own, first in zip(self.model.parameters(), first_weights(), strict=True):
                own.copy_(torch.from_numpy(first.T))
        parameters = self.model.parameters()
        adam = optimizer == "adam"
        self.optimizer: Any = torch.optim.Adam(parameters) if adam else torch.optim.SGD(parameters, 0.1, momentum=0.9)
        self.used_loss = self.broken_loss if broken else self.loss

    def loss(self, model, batch):
        inputs, targets = batch
        self.raise_fault()
        if self.is_too_much(len(inputs)):
            torch.empty(TOO_MANY_ELEMENTS)
        return F.mse_loss(model(inputs), targets)

    @staticmethod
    def broken_loss(model, batch):
        raise KeyError("broken on purpose")

    def asked(self, batch):
        return (self.model, self.used_loss, tensors(batch)), {"optimizer": self.optimizer}

    def asked_for_inference(self, inputs):
        return (self.model, lambda model, x: model(x), torch.from_numpy(inputs)), {"mode": "inference"}

    def estimate_narrow(self, device):
        return self.estimate(device, precision="bf16")

    def plain(self):
        def step(batch):
            self.optimizer.zero_grad()
            loss = self.used_loss(self.model, tensors(batch))
            loss.backward()
            self.optimizer.step()
            return loss.item()

        return step

    def fitted(self, plan):
        fitted = plan.apply(self.model, self.optimizer)
        return lambda batch: float(fitted.step(self.used_loss, tensors(batch)))

    @contextmanager
    def guarded(self):
        with memfit.Guard(self.model, self.optimizer, plan=None, options=memfit.GuardOptions(remember=False)) as guard:
            yield lambda batch: float(guard.step(self.used_loss, tensors(batch)).loss)

    def make_bad_guard(self):
        memfit.Guard(self.model, self.optimizer, options=memfit.GuardOptions(micro_batch_size=0))

    def weights(self):
        return [parameter.detach().numpy().T.copy() for parameter in self.model.parameters()]

    def numbers(self):
        tensors = [*self.model.parameters(), *(p.grad for p in self.model.parameters())]
        for state in self.optimizer.state.values():
            tensors.extend(state.values())
        return [b"" if tensor is None else tensor.detach().numpy().tobytes() for tensor in tensors]

    def identities(self):
        return [id(part) for p in self.model.parameters() for part in (p, p.grad)]

    def oom_errors(self):
        return [*oom_errors.of_torch(), *oom_errors.of_python()]

    def impostors(self):
        return oom_errors.torch_impostors()


def tensors(batch):
    return tuple(torch.from_numpy(part) for part in batch)
