"""Distributed data-parallel training, to be started by torchrun: one process per device."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8, help="per device")
parser.add_argument("--image-size", type=int, default=32)
parser.add_argument("--width", type=int, default=16)
parser.add_argument("--train-size", type=int, default=64)
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--save-every", type=int, default=1)
parser.add_argument("--snapshot-path", default="snapshot.pt")
parser.add_argument("--sync-bn", action="store_true")


class Images(Dataset):
    def __init__(self, size, image_size):
        self.size, self.image_size = size, image_size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(3, self.image_size, self.image_size, generator=generator), index % 10


class ConvNet(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(2 * width)
        self.conv3 = nn.Conv2d(2 * width, 4 * width, 3, stride=2, padding=1)
        self.fc = nn.Linear(4 * width, 10)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.max_pool2d(F.relu(self.bn2(self.conv2(x))), 2)
        x = F.relu(self.conv3(x))
        return self.fc(x.mean((2, 3)))


class Trainer:
    def __init__(self, model, train_data, optimizer, save_every, snapshot_path, device):
        self.local_rank = int(os.environ.get("LOCAL_RANK", 0))
        self.global_rank = int(os.environ.get("RANK", 0))
        self.device = device
        self.model = model.to(device)
        self.train_data = train_data
        self.optimizer = optimizer
        self.save_every = save_every
        self.epochs_run = 0
        self.snapshot_path = snapshot_path
        if os.path.exists(snapshot_path):
            print("Loading snapshot")
            snapshot = torch.load(snapshot_path, map_location=device)
            self.model.load_state_dict(snapshot["MODEL_STATE"])
            self.epochs_run = snapshot["EPOCHS_RUN"]
        self.model = DDP(self.model, device_ids=[self.local_rank] if device.type == "cuda" else None)

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        output = self.model(source)
        loss = F.cross_entropy(output, targets)
        loss.backward()
        self.optimizer.step()
        return loss.detach(), (output.argmax(1) == targets).sum()

    def _run_epoch(self, epoch):
        self.train_data.sampler.set_epoch(epoch)
        totals = torch.zeros(3, device=self.device)
        for source, targets in self.train_data:
            source = source.to(self.device, non_blocking=True)
            targets = targets.to(self.device, non_blocking=True)
            loss, correct = self._run_batch(source, targets)
            totals += torch.stack([loss * len(source), correct.float(), torch.tensor(len(source)).to(self.device)])
        dist.all_reduce(totals, op=dist.ReduceOp.SUM)
        if self.global_rank == 0:
            count = totals[2].item()
            print(f"epoch {epoch} | loss {totals[0].item() / count:.4f} | accuracy {totals[1].item() / count:.3f}")

    def _save_snapshot(self, epoch):
        snapshot = {"MODEL_STATE": self.model.module.state_dict(), "EPOCHS_RUN": epoch + 1}
        torch.save(snapshot, self.snapshot_path)
        print(f"Epoch {epoch} | Training snapshot saved at {self.snapshot_path}")

    def train(self, max_epochs):
        for epoch in range(self.epochs_run, max_epochs):
            self._run_epoch(epoch)
            if self.global_rank == 0 and epoch % self.save_every == 0:
                self._save_snapshot(epoch)
            dist.barrier()


def main():
    args = parser.parse_args()
    use_cuda = torch.cuda.is_available()
    local_rank = int(os.environ["LOCAL_RANK"])
    if use_cuda:
        torch.cuda.set_device(local_rank)
    dist.init_process_group(backend="nccl" if use_cuda else "gloo")
    device = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    torch.manual_seed(0)
    print(f"rank {dist.get_rank()} of {dist.get_world_size()} on {device}")

    dataset = Images(args.train_size, args.image_size)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=args.batch_size, pin_memory=True, shuffle=False, sampler=sampler)
    model = ConvNet(args.width)
    if args.sync_bn:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    # The parameters move with the module, so the optimizer may be made first.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    trainer = Trainer(model, loader, optimizer, args.save_every, args.snapshot_path, device)
    trainer.train(args.epochs)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
