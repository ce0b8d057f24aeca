"""A plain training loop of a small model, and a limit on the data of its process: `plain_loop.py cnn --limit 100`."""

import argparse
import hashlib

import torch
from torch import nn
from torch.nn import functional as F


def cnn():
    layers, width = [], 3
    for wider in (32, 32, 64, 64):
        layers += [nn.Conv2d(width, wider, 3, padding=1, bias=False), nn.BatchNorm2d(wider), nn.ReLU(inplace=True)]
        width = wider
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(width, 10))
    return model, (16, 3, 64, 64), lambda outputs: F.cross_entropy(outputs, torch.randint(0, 10, (16,)))


def transformer():
    layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.1, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), nn.Linear(128, 100))
    return model, (8, 256, 128), token_loss


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.LSTM(128, 256, 2, dropout=0.2, batch_first=True), nn.Linear(256, 100)

    def forward(self, inputs):
        return self.head(self.layers(inputs)[0])


def lstm():
    return Recurrent(), (32, 128, 128), token_loss


def token_loss(outputs):
    return F.cross_entropy(outputs.flatten(0, 1), torch.randint(0, 100, (outputs.shape[0] * outputs.shape[1],)))


def data_bytes():
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmData:"))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=["cnn", "transformer", "lstm"])
    parser.add_argument("--limit", type=int, help="MiB of data beyond what the process has before the first step")
    parser.add_argument("--rescue", action="store_true")
    parser.add_argument("--eager", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, shape, loss = globals()[options.model]()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    if options.limit:
        import resource

        limit = data_bytes() + options.limit * 2**20
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    if options.rescue:
        from memfit.frameworks.torch.rescue import Rescue

        Rescue(eager=options.eager)
    for _ in range(2):
        value = loss(model(torch.randn(shape)))
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        del value
    digest = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
    for tensor in model.state_dict().values():
        digest.update(tensor.numpy().tobytes())
    print("weights", digest.hexdigest())


if __name__ == "__main__":
    main()
