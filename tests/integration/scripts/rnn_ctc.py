"""Speech recognition with a bidirectional recurrent network and CTC: packed sequences, greedy decoding."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--frames", type=int, default=60)
parser.add_argument("--features", type=int, default=16)
parser.add_argument("--hidden", type=int, default=32)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--vocab-size", type=int, default=29)
parser.add_argument("--train-size", type=int, default=16)
parser.add_argument("--epochs", type=int, default=1)


class Utterances(Dataset):
    def __init__(self, size, args):
        self.size, self.args = size, args

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        length = int(torch.randint(self.args.frames // 2, self.args.frames + 1, (1,), generator=generator))
        spectrogram = torch.randn(length, self.args.features, generator=generator)
        return spectrogram, torch.randint(1, self.args.vocab_size, (max(1, length // 10),), generator=generator)


def collate(batch):
    batch.sort(key=lambda pair: len(pair[0]), reverse=True)
    inputs = pad_sequence([x for x, _ in batch], batch_first=True)
    input_lengths = torch.tensor([len(x) for x, _ in batch])
    targets = torch.cat([y for _, y in batch])
    return inputs, input_lengths, targets, torch.tensor([len(y) for _, y in batch])


class SpeechModel(nn.Module):
    def __init__(self, features, hidden, layers, vocab_size):
        super().__init__()
        self.norm = nn.LayerNorm(features)
        self.rnn = nn.GRU(features, hidden, layers, batch_first=True, bidirectional=True, dropout=0.1)
        self.fc = nn.Linear(2 * hidden, vocab_size)

    def forward(self, x, lengths):
        self.rnn.flatten_parameters()
        packed = pack_padded_sequence(self.norm(x), lengths.cpu(), batch_first=True)
        out, _ = self.rnn(packed)
        out, out_lengths = pad_packed_sequence(out, batch_first=True)
        return F.log_softmax(self.fc(out), dim=-1), out_lengths


def greedy_decode(log_probs, lengths):
    decoded = []
    for path, n in zip(log_probs.argmax(-1), lengths, strict=True):
        collapsed = torch.unique_consecutive(path[:n])
        decoded.append([t for t in collapsed.tolist() if t != 0])
    return decoded


def edit_distance(a, b):
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        previous, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (x != y))
    return row[-1]


def main():
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loader = DataLoader(Utterances(args.train_size, args), args.batch_size, shuffle=True, collate_fn=collate)
    model = SpeechModel(args.features, args.hidden, args.layers, args.vocab_size).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=5e-4, steps_per_epoch=len(loader), epochs=args.epochs, anneal_strategy="linear"
    )
    criterion = nn.CTCLoss(blank=0, zero_infinity=True).to(device)
    for epoch in range(args.epochs):
        for step, (inputs, input_lengths, targets, target_lengths) in enumerate(loader):
            inputs, targets = inputs.to(device), targets.to(device)
            optimizer.zero_grad()
            log_probs, out_lengths = model(inputs, input_lengths)
            loss = criterion(log_probs.transpose(0, 1), targets, out_lengths, target_lengths)
            loss.backward()
            optimizer.step()
            scheduler.step()
            hypotheses = greedy_decode(log_probs.detach(), out_lengths)
            references = [t.tolist() for t in targets.cpu().split(target_lengths.tolist())]
            errors = sum(edit_distance(h, r) for h, r in zip(hypotheses, references, strict=True))
            rate = errors / max(1, int(target_lengths.sum()))
            print(f"epoch {epoch} step {step}: loss {loss.item():.3f} error rate {rate:.3f}")


if __name__ == "__main__":
    main()
