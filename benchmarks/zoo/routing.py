"""Models that gather and scatter: graphs, mixtures of experts, recommendation with large embeddings, tables."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.zoo.case import add


class MeanAggregation(nn.Module):
    """GraphSAGE: the mean of the neighbours, by index_add."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.own, self.neighbours = nn.Linear(inputs, outputs), nn.Linear(inputs, outputs)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        """New features of the nodes."""
        source, target = edges
        total = torch.zeros_like(nodes).index_add(0, target, nodes[source])
        degree = torch.zeros(len(nodes), device=nodes.device).index_add(
            0, target, torch.ones_like(target, dtype=nodes.dtype)
        )
        mixed: Tensor = self.own(nodes) + self.neighbours(total / degree.clamp(min=1)[:, None])
        return mixed


class GraphAttention(nn.Module):
    """GAT: softmax over the incoming edges, by scatter_reduce and scatter_add."""

    def __init__(self, inputs: int, outputs: int, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.width = heads, outputs // heads
        self.project = nn.Linear(inputs, outputs, bias=False)
        self.score = nn.Parameter(torch.randn(2, heads, outputs // heads) * 0.1)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        """New features of the nodes."""
        source, target = edges
        hidden = self.project(nodes).view(-1, self.heads, self.width)
        score = (hidden * self.score[0]).sum(-1)[source] + (hidden * self.score[1]).sum(-1)[target]
        score = F.leaky_relu(score, 0.2)
        index = target[:, None].expand_as(score)
        largest = torch.full((len(nodes), self.heads), -1e9, device=nodes.device)
        largest = largest.scatter_reduce(0, index, score.detach(), "amax")
        weight = torch.exp(score - largest.gather(0, index))
        total = torch.zeros(len(nodes), self.heads, device=nodes.device).scatter_add(0, index, weight)
        weight = weight / total.gather(0, index).clamp(min=1e-9)
        message = hidden.index_select(0, source) * weight[..., None]
        return torch.zeros_like(hidden).index_add(0, target, message).flatten(1)


class GraphNetwork(nn.Module):
    """Two layers of message passing and a classifier of nodes."""

    def __init__(self, layer: type[MeanAggregation] | type[GraphAttention]) -> None:
        super().__init__()
        self.first, self.second, self.head = layer(64, 128), layer(128, 128), nn.Linear(128, 16)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        """Class logits of the nodes."""
        hidden = F.dropout(F.relu(self.first(nodes, edges)), 0.2, self.training)
        logits: Tensor = self.head(F.relu(self.second(hidden, edges)))
        return logits


def graph() -> tuple[Tensor, Tensor, Tensor]:
    """A random graph with features and a class per node."""
    return torch.randn(3000, 64), torch.randint(3000, (2, 24000)), torch.randint(16, (3000,))


def label_nodes(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Cross entropy of the nodes."""
    nodes, edges, labels = batch
    return F.cross_entropy(model(nodes, edges), labels)


class Expert(nn.Sequential):
    """A feed-forward block."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class CapacityMixture(nn.Module):
    """Top-2 routing into slots of a fixed number, surplus tokens dropped: shapes never depend on values."""

    def __init__(self, width: int, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.router = nn.Linear(width, num_experts, bias=False)
        self.up = nn.Parameter(torch.randn(num_experts, width, 4 * width) * 0.02)
        self.down = nn.Parameter(torch.randn(num_experts, 4 * width, width) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Weighted sum of two experts per token."""
        tokens = x.flatten(0, -2)
        count, width = tokens.shape
        capacity = 2 * count * 5 // (4 * self.num_experts)
        weight, expert = self.router(tokens).softmax(-1).topk(2, -1)
        chosen = F.one_hot(expert.flatten(), self.num_experts)
        position = (chosen.cumsum(0) * chosen).sum(-1) - 1
        slot = expert.flatten() * capacity + position
        slot = torch.where(position < capacity, slot, self.num_experts * capacity)
        slots = tokens.new_zeros(self.num_experts * capacity + 1, width)
        slots = slots.index_copy(0, slot, tokens.repeat_interleave(2, 0))
        hidden = F.gelu(torch.bmm(slots[:-1].view(self.num_experts, capacity, width), self.up))
        out = torch.cat([torch.bmm(hidden, self.down).flatten(0, 1), tokens.new_zeros(1, width)])
        mixed: Tensor = (out[slot].view(count, 2, width) * weight[..., None]).sum(1).view_as(x)
        return mixed


class DynamicMixture(nn.Module):
    """Top-2 routing with as many tokens per expert as chose it: shapes depend on values."""

    def __init__(self, width: int, num_experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, num_experts, bias=False)
        self.experts = nn.ModuleList(Expert(width) for _ in range(num_experts))

    def forward(self, x: Tensor) -> Tensor:
        """Weighted sum of two experts per token."""
        tokens = x.flatten(0, -2)
        weight, chosen = self.router(tokens).softmax(-1).topk(2, -1)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            token, rank = torch.where(chosen == number)
            out.index_add_(0, token, expert(tokens[token]) * weight[token, rank, None])
        return out.view_as(x)


class MixtureModel(nn.Module):
    """A decoder whose feed-forward blocks are mixtures of experts."""

    def __init__(self, mixture: type[CapacityMixture] | type[DynamicMixture], width: int = 192) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4000, width)
        self.attention = nn.ModuleList(nn.MultiheadAttention(width, 4, batch_first=True) for _ in range(2))
        self.mixtures = nn.ModuleList(mixture(width, 8) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(4))
        self.head = nn.Linear(width, 4000)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token."""
        x = self.embedding(tokens)
        for layer in range(2):
            y = self.norms[2 * layer](x)
            x = x + self.attention[layer](y, y, y, need_weights=False)[0]
            x = x + self.mixtures[layer](self.norms[2 * layer + 1](x))
        logits: Tensor = self.head(x)
        return logits


def next_token(model: nn.Module, batch: Tensor) -> Tensor:
    """Cross entropy of the next token."""
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


class Recommender(nn.Module):
    """DLRM: embedding bags, pairwise dot products, two perceptrons."""

    pairs: Tensor

    def __init__(self, sparse: bool, num_tables: int = 6, width: int = 32) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(20000, width, mode="sum", sparse=sparse) for _ in range(num_tables))
        self.bottom = nn.Sequential(nn.Linear(13, 256), nn.ReLU(), nn.Linear(256, width), nn.ReLU())
        pairs = (num_tables + 1) * num_tables // 2
        self.top = nn.Sequential(nn.Linear(width + pairs, 256), nn.ReLU(), nn.Linear(256, 1))
        self.register_buffer("pairs", torch.tril_indices(num_tables + 1, num_tables + 1, -1), persistent=False)

    def forward(self, dense: Tensor, categories: Tensor) -> Tensor:
        """Logit of a click."""
        x = self.bottom(dense)
        features = torch.stack([x, *(table(categories[:, i]) for i, table in enumerate(self.tables))], 1)
        products = torch.bmm(features, features.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        logit: Tensor = self.top(torch.cat([x, products], 1)).squeeze(1)
        return logit


def clicks() -> tuple[Tensor, Tensor, Tensor]:
    """Dense features, bags of four categories per table, and clicks."""
    return torch.randn(2048, 13), torch.randint(20000, (2048, 6, 4)), torch.randint(2, (2048,)).float()


def click_loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Binary cross entropy of the click."""
    dense, categories, target = batch
    return F.binary_cross_entropy_with_logits(model(dense, categories), target)


class TableModel(nn.Module):
    """Categorical embeddings and numbers into a perceptron with batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(200, 16) for _ in range(8))
        layers: list[nn.Module] = []
        for inputs, outputs in ((8 * 16 + 20, 1024), (1024, 1024), (1024, 512)):
            layers += [nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs), nn.ReLU(), nn.Dropout(0.3)]
        self.body = nn.Sequential(*layers, nn.Linear(512, 1))

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        """One value per row."""
        parts = [embedding(categories[:, i]) for i, embedding in enumerate(self.embeddings)]
        value: Tensor = self.body(torch.cat([numbers, *parts], 1)).squeeze(1)
        return value


def rows() -> tuple[Tensor, Tensor, Tensor]:
    """Numbers, categories and a target per row."""
    return torch.randn(1024, 20), torch.randint(200, (1024, 8)), torch.randn(1024)


def regress(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Huber loss of the value."""
    numbers, categories, target = batch
    return F.huber_loss(model(numbers, categories), target)


add("graph_sage", "graph", lambda: GraphNetwork(MeanAggregation), graph, label_nodes)
add("graph_attention", "graph", lambda: GraphNetwork(GraphAttention), graph, label_nodes)
add(
    "moe_capacity",
    "mixture of experts",
    lambda: MixtureModel(CapacityMixture),
    lambda: torch.randint(4000, (4, 129)),
    next_token,
)
add(
    "moe_dynamic",
    "data-dependent",
    lambda: MixtureModel(DynamicMixture),
    lambda: torch.randint(4000, (4, 129)),
    next_token,
)
add("dlrm", "recommendation", lambda: Recommender(sparse=False), clicks, click_loss)
add("dlrm_sparse", "sparse gradient", lambda: Recommender(sparse=True), clicks, click_loss, optimizers=("sgd",))
add("tabular_mlp", "tabular", TableModel, rows, regress)
