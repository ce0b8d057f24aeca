"""Graph attention on one citation-like graph: sparse adjacency, masks for training and evaluation, early stopping."""

import argparse
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim import Adam

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--batch-size", type=int, default=1, help="graphs; always one")
parser.add_argument("--nodes", type=int, default=60)
parser.add_argument("--features", type=int, default=24)
parser.add_argument("--hidden-dim", type=int, default=16)
parser.add_argument("--num-heads", type=int, default=4)
parser.add_argument("--sparse", action="store_true", help="graph convolution by sparse matrix products")
parser.add_argument("--patience", type=int, default=20)


class GraphAttentionLayer(nn.Module):
    def __init__(self, in_features, out_features, n_heads, concat=False, dropout=0.4):
        super().__init__()
        self.n_heads, self.concat, self.dropout = n_heads, concat, dropout
        self.n_hidden = out_features // n_heads if concat else out_features
        self.W = nn.Parameter(torch.empty(size=(in_features, self.n_hidden * n_heads)))
        self.a = nn.Parameter(torch.empty(size=(n_heads, 2 * self.n_hidden, 1)))
        nn.init.xavier_normal_(self.W)
        nn.init.xavier_normal_(self.a)

    def forward(self, h, adj_mat):
        n_nodes = h.shape[0]
        h_transformed = F.dropout(torch.mm(h, self.W), self.dropout, training=self.training)
        h_transformed = h_transformed.view(n_nodes, self.n_heads, self.n_hidden).permute(1, 0, 2)
        source = torch.matmul(h_transformed, self.a[:, : self.n_hidden, :])
        target = torch.matmul(h_transformed, self.a[:, self.n_hidden :, :])
        e = F.leaky_relu(source + target.mT)
        attention = torch.where(adj_mat > 0, e, -9e16 * torch.ones_like(e))
        attention = F.dropout(F.softmax(attention, dim=-1), self.dropout, training=self.training)
        h_prime = torch.matmul(attention, h_transformed)
        if self.concat:
            return h_prime.permute(1, 0, 2).contiguous().view(n_nodes, self.n_heads * self.n_hidden)
        return h_prime.mean(dim=0)


class GAT(nn.Module):
    def __init__(self, in_features, n_hidden, n_heads, num_classes):
        super().__init__()
        self.gat1 = GraphAttentionLayer(in_features, n_hidden, n_heads, concat=True)
        self.gat2 = GraphAttentionLayer(n_hidden, num_classes, 1)

    def forward(self, x, adj_mat):
        x = F.elu(self.gat1(x, adj_mat.to_dense() if adj_mat.is_sparse else adj_mat))
        return F.log_softmax(self.gat2(x, adj_mat.to_dense() if adj_mat.is_sparse else adj_mat), dim=1)


class GCN(nn.Module):
    def __init__(self, in_features, n_hidden, num_classes):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(in_features, n_hidden), nn.Linear(n_hidden, num_classes)

    def forward(self, x, adj_mat):
        x = F.relu(torch.sparse.mm(adj_mat, self.fc1(x)))
        return F.log_softmax(torch.sparse.mm(adj_mat, self.fc2(x)), dim=1)


def load_graph(args, device):
    features = torch.rand(args.nodes, args.features)
    features = features / features.sum(1, keepdim=True).clamp(min=1)
    edges = torch.randint(args.nodes, (2, 4 * args.nodes))
    adjacency = torch.sparse_coo_tensor(edges, torch.ones(edges.shape[1]), (args.nodes, args.nodes)).coalesce()
    dense = adjacency.to_dense().clamp(max=1) + torch.eye(args.nodes)
    normal = dense / dense.sum(1, keepdim=True)
    labels = torch.randint(5, (args.nodes,))
    adjacency = normal.to_sparse() if args.sparse else normal
    return features.to(device), labels.to(device), adjacency.to(device)


def main():
    args = parser.parse_args()
    torch.manual_seed(13)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    features, labels, adj_mat = load_graph(args, device)
    idx = torch.randperm(len(labels)).to(device)
    idx_test, idx_val, idx_train = idx[:20], idx[20:30], idx[30:]
    if args.sparse:
        model = GCN(args.features, args.hidden_dim, int(labels.max().item()) + 1).to(device)
    else:
        model = GAT(args.features, args.hidden_dim, args.num_heads, int(labels.max().item()) + 1).to(device)
    optimizer = Adam(model.parameters(), lr=0.005, weight_decay=5e-4)
    best, waited = float("inf"), 0
    for epoch in range(args.epochs):
        start = time.time()
        model.train()
        optimizer.zero_grad()
        output = model(features, adj_mat)
        loss = F.nll_loss(output[idx_train], labels[idx_train])
        loss.backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            output = model(features, adj_mat)
            val_loss = F.nll_loss(output[idx_val], labels[idx_val]).item()
            accuracy = output[idx_val].argmax(dim=1).eq(labels[idx_val]).double().mean()
        print(
            f"Epoch {epoch:04d} ({time.time() - start:.2f}s) loss {loss.item():.4f} val {val_loss:.4f} {accuracy:.3f}"
        )
        best, waited = (val_loss, 0) if val_loss < best else (best, waited + 1)
        if waited > args.patience:
            break
    with torch.no_grad():
        output = model(features, adj_mat)
    print("test accuracy", output[idx_test].argmax(dim=1).eq(labels[idx_test]).double().mean().item())


if __name__ == "__main__":
    main()
