"""Trains a language model on token sequences in float32, with nothing done to save memory.

python examples/plan_script/train.py --width 64 --depth 2 --batch-size 4 --steps 2    # for real, on whatever there is
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--length", type=int, default=512)
parser.add_argument("--width", type=int, default=768)
parser.add_argument("--depth", type=int, default=12)
parser.add_argument("--steps", type=int, default=10_000)
args = parser.parse_args()

VOCABULARY = 32_000
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Sequences(Dataset):
    """Stands for a corpus."""

    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randint(0, VOCABULARY, (args.length + 1,), generator=generator)


class LanguageModel(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(args.length, width)
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, activation="gelu", batch_first=True, norm_first=True)
        self.decoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens):
        length = tokens.shape[1]
        x = self.embed(tokens) + self.position(torch.arange(length, device=tokens.device))
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        return self.head(self.decoder(x, mask=mask, is_causal=True))


def main():
    loader = DataLoader(Sequences(), args.batch_size, shuffle=True)
    model = LanguageModel(args.width, args.depth).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step, tokens in zip(range(args.steps), loader, strict=False):
        tokens = tokens.to(device)
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
