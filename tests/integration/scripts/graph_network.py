"""Message passing on batched graphs with index_add and scatter, no graph library."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=4, help="graphs per batch")
parser.add_argument("--nodes", type=int, default=20, help="nodes of a graph, at most")
parser.add_argument("--degree", type=int, default=4)
parser.add_argument("--features", type=int, default=8)
parser.add_argument("--hidden", type=int, default=32)
parser.add_argument("--layers", type=int, default=3)
parser.add_argument("--graphs", type=int, default=16)
parser.add_argument("--epochs", type=int, default=1)


class Graphs(Dataset):
    def __init__(self, size, args):
        self.size, self.args = size, args

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        nodes = int(torch.randint(self.args.nodes // 2, self.args.nodes + 1, (1,), generator=generator))
        edges = torch.randint(nodes, (2, nodes * self.args.degree), generator=generator)
        return torch.randn(nodes, self.args.features, generator=generator), edges, torch.tensor(index % 3)


def collate(graphs):
    """One large graph of separate parts, with the graph that each node belongs to."""
    offsets, total = [], 0
    for x, _, _ in graphs:
        offsets.append(total)
        total += len(x)
    x = torch.cat([g[0] for g in graphs])
    edges = torch.cat([g[1] + offset for g, offset in zip(graphs, offsets, strict=True)], dim=1)
    belongs = torch.cat([torch.full((len(g[0]),), i) for i, g in enumerate(graphs)])
    return x, edges, belongs, torch.stack([g[2] for g in graphs])


class GraphConv(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.message = nn.Sequential(nn.Linear(2 * channels, channels), nn.ReLU(), nn.Linear(channels, channels))
        self.update = nn.GRUCell(channels, channels)

    def forward(self, x, edges):
        source, target = edges
        messages = self.message(torch.cat([x[source], x[target]], dim=1))
        summed = torch.zeros_like(x).index_add_(0, target, messages)
        ones = torch.ones_like(messages[:, :1])
        degree = torch.zeros(len(x), 1, device=x.device).scatter_add_(0, target[:, None], ones)
        return self.update(summed / degree.clamp(min=1), x)


class GraphNet(nn.Module):
    def __init__(self, features, hidden, layers, classes=3):
        super().__init__()
        self.embed = nn.Linear(features, hidden)
        self.convs = nn.ModuleList([GraphConv(hidden) for _ in range(layers)])
        self.head = nn.Linear(2 * hidden, classes)

    def forward(self, x, edges, belongs):
        h = self.embed(x)
        for conv in self.convs:
            h = conv(h, edges)
        num_graphs = int(belongs.max()) + 1
        mean = torch.zeros(num_graphs, h.shape[1], device=h.device)
        mean = mean.scatter_reduce(0, belongs[:, None].expand_as(h), h, reduce="mean", include_self=False)
        largest = torch.full_like(mean, float("-inf")).scatter_reduce(
            0, belongs[:, None].expand_as(h), h, reduce="amax", include_self=False
        )
        return self.head(torch.cat([mean, largest], dim=1))


def main():
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loader = DataLoader(Graphs(args.graphs, args), args.batch_size, shuffle=True, collate_fn=collate)
    model = GraphNet(args.features, args.hidden, args.layers).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(args.epochs):
        correct = seen = 0
        for batch in loader:
            x, edges, belongs, y = (part.to(device) for part in batch)
            out = model(x, edges, belongs)
            loss = F.cross_entropy(out, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            correct += int((out.argmax(1) == y).sum())
            seen += len(y)
        print(f"epoch {epoch}: loss {loss.item():.4f} accuracy {correct / seen:.3f}")


if __name__ == "__main__":
    main()
