"""An ordinary training script: a small language model in plain PyTorch, which knows nothing of memfit."""

import hashlib

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY, WIDTH, DEPTH, LENGTH, BATCH, STEPS = 512, 192, 6, 256, 8, 3


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(
            [nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, dropout=0.1, batch_first=True) for _ in range(DEPTH)]
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        hidden = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        for layer in self.layers:
            hidden = layer(hidden, mask, is_causal=True)
        return self.head(hidden)


def loss(model, batch):
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def make_batch():
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1))
    return tokens[:, :-1], tokens[:, 1:]


def main():
    torch.manual_seed(0)
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        value = loss(model, make_batch())
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        print(f"step {step + 1}: loss {value.item():.6f}", flush=True)
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    print(f"weights: {hashlib.sha256(weights).hexdigest()[:16]}")


if __name__ == "__main__":
    main()
