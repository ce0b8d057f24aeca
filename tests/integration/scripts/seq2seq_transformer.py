"""Translation with nn.Transformer: padded batches of varying length, masks, label smoothing, greedy decoding."""

import argparse
import math
from timeit import default_timer as timer

import torch
import torch.nn as nn
from torch.nn import Transformer
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

UNK_IDX, PAD_IDX, BOS_IDX, EOS_IDX = 0, 1, 2, 3

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--min-length", type=int, default=5)
parser.add_argument("--max-length", type=int, default=20)
parser.add_argument("--vocab-size", type=int, default=200)
parser.add_argument("--emb-size", type=int, default=32)
parser.add_argument("--nhead", type=int, default=4)
parser.add_argument("--ffn-hid-dim", type=int, default=64)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--train-size", type=int, default=32)
parser.add_argument("--val-size", type=int, default=8)
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--label-smoothing", type=float, default=0.1)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class PositionalEncoding(nn.Module):
    def __init__(self, emb_size, dropout, maxlen=5000):
        super().__init__()
        den = torch.exp(-torch.arange(0, emb_size, 2) * math.log(10000) / emb_size)
        pos = torch.arange(0, maxlen).reshape(maxlen, 1)
        pos_embedding = torch.zeros((maxlen, emb_size))
        pos_embedding[:, 0::2] = torch.sin(pos * den)
        pos_embedding[:, 1::2] = torch.cos(pos * den)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("pos_embedding", pos_embedding.unsqueeze(-2))

    def forward(self, token_embedding):
        return self.dropout(token_embedding + self.pos_embedding[: token_embedding.size(0), :])


class TokenEmbedding(nn.Module):
    def __init__(self, vocab_size, emb_size):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, emb_size)
        self.emb_size = emb_size

    def forward(self, tokens):
        return self.embedding(tokens.long()) * math.sqrt(self.emb_size)


class Seq2SeqTransformer(nn.Module):
    def __init__(self, layers, emb_size, nhead, vocab_size, dim_feedforward=512, dropout=0.1):
        super().__init__()
        self.transformer = Transformer(
            d_model=emb_size,
            nhead=nhead,
            num_encoder_layers=layers,
            num_decoder_layers=layers,
            dim_feedforward=dim_feedforward,
            dropout=dropout,
        )
        self.generator = nn.Linear(emb_size, vocab_size)
        self.src_tok_emb = TokenEmbedding(vocab_size, emb_size)
        self.tgt_tok_emb = TokenEmbedding(vocab_size, emb_size)
        self.positional_encoding = PositionalEncoding(emb_size, dropout=dropout)

    def forward(self, src, trg, src_mask, tgt_mask, src_padding_mask, tgt_padding_mask, memory_key_padding_mask):
        src_emb = self.positional_encoding(self.src_tok_emb(src))
        tgt_emb = self.positional_encoding(self.tgt_tok_emb(trg))
        outs = self.transformer(
            src_emb, tgt_emb, src_mask, tgt_mask, None, src_padding_mask, tgt_padding_mask, memory_key_padding_mask
        )
        return self.generator(outs)

    def encode(self, src, src_mask):
        return self.transformer.encoder(self.positional_encoding(self.src_tok_emb(src)), src_mask)

    def decode(self, tgt, memory, tgt_mask):
        return self.transformer.decoder(self.positional_encoding(self.tgt_tok_emb(tgt)), memory, tgt_mask)


def generate_square_subsequent_mask(sz, device):
    mask = (torch.triu(torch.ones((sz, sz), device=device)) == 1).transpose(0, 1)
    return mask.float().masked_fill(mask == 0, float("-inf")).masked_fill(mask == 1, 0.0)


def create_mask(src, tgt):
    src_seq_len = src.shape[0]
    tgt_seq_len = tgt.shape[0]
    tgt_mask = generate_square_subsequent_mask(tgt_seq_len, src.device)
    src_mask = torch.zeros((src_seq_len, src_seq_len), device=src.device).type(torch.bool)
    src_padding_mask = (src == PAD_IDX).transpose(0, 1)
    tgt_padding_mask = (tgt == PAD_IDX).transpose(0, 1)
    return src_mask, tgt_mask, src_padding_mask, tgt_padding_mask


def make_pairs(size, args, seed):
    generator = torch.Generator().manual_seed(seed)
    pairs = []
    for _ in range(size):
        n = int(torch.randint(args.min_length, args.max_length + 1, (1,), generator=generator))
        tokens = torch.randint(4, args.vocab_size, (n,), generator=generator)
        pairs.append((tokens, tokens.flip(0)))
    return pairs


def tensor_transform(token_ids):
    return torch.cat((torch.tensor([BOS_IDX]), token_ids, torch.tensor([EOS_IDX])))


def collate_fn(batch):
    src_batch = pad_sequence([tensor_transform(src) for src, _ in batch], padding_value=PAD_IDX)
    tgt_batch = pad_sequence([tensor_transform(tgt) for _, tgt in batch], padding_value=PAD_IDX)
    return src_batch, tgt_batch


def forward_loss(model, src, tgt, loss_fn):
    tgt_input = tgt[:-1, :]
    src_mask, tgt_mask, src_padding_mask, tgt_padding_mask = create_mask(src, tgt_input)
    logits = model(src, tgt_input, src_mask, tgt_mask, src_padding_mask, tgt_padding_mask, src_padding_mask)
    tgt_out = tgt[1:, :]
    return loss_fn(logits.reshape(-1, logits.shape[-1]), tgt_out.reshape(-1))


def train_epoch(model, optimizer, loss_fn, dataloader):
    model.train()
    losses = 0
    for src, tgt in dataloader:
        src = src.to(DEVICE)
        tgt = tgt.to(DEVICE)
        optimizer.zero_grad()
        loss = forward_loss(model, src, tgt, loss_fn)
        loss.backward()
        optimizer.step()
        losses += loss.item()
    return losses / len(dataloader)


@torch.no_grad()
def evaluate(model, loss_fn, dataloader):
    model.eval()
    losses = 0
    for src, tgt in dataloader:
        losses += forward_loss(model, src.to(DEVICE), tgt.to(DEVICE), loss_fn).item()
    return losses / len(dataloader)


@torch.no_grad()
def greedy_decode(model, src, src_mask, max_len, start_symbol):
    src = src.to(DEVICE)
    src_mask = src_mask.to(DEVICE)
    memory = model.encode(src, src_mask)
    ys = torch.ones(1, 1).fill_(start_symbol).type(torch.long).to(DEVICE)
    for _ in range(max_len - 1):
        tgt_mask = generate_square_subsequent_mask(ys.size(0), DEVICE).type(torch.bool).to(DEVICE)
        out = model.decode(ys, memory.to(DEVICE), tgt_mask)
        prob = model.generator(out.transpose(0, 1)[:, -1])
        _, next_word = torch.max(prob, dim=1)
        next_word = next_word.item()
        ys = torch.cat([ys, torch.ones(1, 1).type_as(src.data).fill_(next_word)], dim=0)
        if next_word == EOS_IDX:
            break
    return ys


def translate(model, src_tokens):
    model.eval()
    src = tensor_transform(src_tokens).view(-1, 1)
    num_tokens = src.shape[0]
    src_mask = (torch.zeros(num_tokens, num_tokens)).type(torch.bool)
    tgt_tokens = greedy_decode(model, src, src_mask, max_len=num_tokens + 5, start_symbol=BOS_IDX).flatten()
    return " ".join(f"w{token}" for token in tgt_tokens.cpu().numpy().tolist())


def main():
    args = parser.parse_args()
    torch.manual_seed(0)
    transformer = Seq2SeqTransformer(args.layers, args.emb_size, args.nhead, args.vocab_size, args.ffn_hid_dim)
    for p in transformer.parameters():
        if p.dim() > 1:
            nn.init.xavier_uniform_(p)
    transformer = transformer.to(DEVICE)
    loss_fn = torch.nn.CrossEntropyLoss(ignore_index=PAD_IDX, label_smoothing=args.label_smoothing)
    optimizer = torch.optim.Adam(transformer.parameters(), lr=0.0001, betas=(0.9, 0.98), eps=1e-9)
    train_pairs, val_pairs = make_pairs(args.train_size, args, 0), make_pairs(args.val_size, args, 1)

    for epoch in range(1, args.epochs + 1):
        start_time = timer()
        loader = DataLoader(train_pairs, batch_size=args.batch_size, collate_fn=collate_fn, shuffle=True)
        train_loss = train_epoch(transformer, optimizer, loss_fn, loader)
        end_time = timer()
        val_loss = evaluate(
            transformer, loss_fn, DataLoader(val_pairs, batch_size=args.batch_size, collate_fn=collate_fn)
        )
        print(
            f"Epoch: {epoch}, Train loss: {train_loss:.3f}, Val loss: {val_loss:.3f}, "
            f"Epoch time = {end_time - start_time:.3f}s"
        )
    print(translate(transformer, val_pairs[0][0]))


if __name__ == "__main__":
    main()
