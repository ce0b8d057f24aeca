"""Feeds the device from a background thread and a side stream, so that copies overlap with computation."""

import argparse
import queue
import threading

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--image-size", type=int, default=32)
parser.add_argument("--width", type=int, default=16)
parser.add_argument("--train-size", type=int, default=40)
parser.add_argument("--mode", choices=["thread", "stream"], default="stream")


class ByteImages(Dataset):
    def __init__(self, size, image_size):
        self.size, self.image_size = size, image_size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        shape = (3, self.image_size, self.image_size)
        return torch.randint(256, shape, dtype=torch.uint8, generator=generator), index % 10


class DataPrefetcher:
    """Copies and normalizes the next batch on a stream of its own."""

    def __init__(self, loader, device):
        self.loader = iter(loader)
        self.device = device
        self.stream = torch.cuda.Stream() if device.type == "cuda" else None
        self.mean = torch.tensor([0.485 * 255, 0.456 * 255, 0.406 * 255]).to(device).view(1, 3, 1, 1)
        self.std = torch.tensor([0.229 * 255, 0.224 * 255, 0.225 * 255]).to(device).view(1, 3, 1, 1)
        self.preload()

    def preload(self):
        try:
            self.next_input, self.next_target = next(self.loader)
        except StopIteration:
            self.next_input = None
            self.next_target = None
            return
        if self.stream is None:
            self.next_input = self.next_input.float().sub_(self.mean).div_(self.std)
            return
        with torch.cuda.stream(self.stream):
            self.next_input = self.next_input.to(self.device, non_blocking=True)
            self.next_target = self.next_target.to(self.device, non_blocking=True)
            self.next_input = self.next_input.float()
            self.next_input = self.next_input.sub_(self.mean).div_(self.std)

    def next(self):
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)
        input, target = self.next_input, self.next_target
        if input is not None and self.stream is not None:
            input.record_stream(torch.cuda.current_stream())
            target.record_stream(torch.cuda.current_stream())
        self.preload()
        return input, target


class ThreadedLoader(threading.Thread):
    """Moves batches to the device ahead of their use; a queue of two holds them."""

    def __init__(self, loader, device):
        super().__init__(daemon=True)
        self.loader, self.device = loader, device
        self.queue = queue.Queue(maxsize=2)

    def run(self):
        for images, target in self.loader:
            images = images.to(self.device, non_blocking=True).float().div_(255)
            self.queue.put((images, target.to(self.device, non_blocking=True)))
        self.queue.put((None, None))

    def next(self):
        return self.queue.get()


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.conv3 = nn.Conv2d(2 * width, 2 * width, 3, padding=1)
        self.fc = nn.Linear(2 * width, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv3(F.relu(self.conv2(x))))
        return self.fc(x.mean((2, 3)))


def main():
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dataset = ByteImages(args.train_size, args.image_size)
    loader = DataLoader(dataset, args.batch_size, shuffle=True, pin_memory=device.type == "cuda", drop_last=True)
    model = Net(args.width).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    if args.mode == "stream":
        source = DataPrefetcher(loader, device)
    else:
        source = ThreadedLoader(loader, device)
        source.start()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2)) if device.type == "cuda" else (None, None)
    input, target = source.next()
    i = 0
    while input is not None:
        if start is not None:
            start.record()
        loss = F.cross_entropy(model(input), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        elapsed = ""
        if end is not None:
            end.record()
            end.synchronize()
            elapsed = f" {start.elapsed_time(end):.2f} ms"
        print(f"step {i}: loss {loss.item():.4f}{elapsed}")
        i += 1
        input, target = source.next()


if __name__ == "__main__":
    main()
