"""Fine-tunes a text classifier on documents of very different lengths. Each batch is padded to its longest document.

python examples/dryrun/long_documents.py --width 64 --batch-size 2 --steps 2    # for real, on whatever there is
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--width", type=int, default=512)
parser.add_argument("--depth", type=int, default=12)
parser.add_argument("--documents", type=int, default=3200)
parser.add_argument("--steps", type=int, default=10_000)
args = parser.parse_args()

VOCABULARY = 32_000
LONGEST = 4096
PADDING = 0
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Documents(Dataset):
    """Stands for a corpus: most documents have a few hundred tokens, a few have thousands."""

    def __init__(self, count):
        generator = torch.Generator().manual_seed(2)
        lengths = torch.exp(torch.randn(count, generator=generator) * 0.7 + 5.5).long()
        self.lengths = lengths.clamp(8, LONGEST).tolist()

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randint(1, VOCABULARY, (self.lengths[index],), generator=generator), index % 2


def collate(samples):
    documents, labels = zip(*samples, strict=True)
    tokens = pad_sequence(documents, batch_first=True, padding_value=PADDING)
    return {"tokens": tokens, "mask": tokens != PADDING, "labels": torch.tensor(labels)}


class TextClassifier(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(LONGEST, width)
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, activation="gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, 2)

    def forward(self, tokens, mask):
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        x = self.encoder(x, src_key_padding_mask=~mask)
        weights = mask.unsqueeze(-1) / mask.sum(1, keepdim=True).unsqueeze(-1)
        return self.head((x * weights).sum(1))


def main():
    loader = DataLoader(Documents(args.documents), args.batch_size, shuffle=True, collate_fn=collate, drop_last=True)
    model = TextClassifier(args.width, args.depth).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step, batch in zip(range(args.steps), loader, strict=False):
        batch = {name: tensor.to(device) for name, tensor in batch.items()}
        with torch.autocast(device.type, dtype=torch.bfloat16):
            logits = model(batch["tokens"], batch["mask"])
        loss = F.cross_entropy(logits.float(), batch["labels"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            print(f"step {step}: loss {loss.item():.3f}, {batch['tokens'].numel()} tokens")


if __name__ == "__main__":
    main()
