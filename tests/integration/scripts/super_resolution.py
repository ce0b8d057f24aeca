"""Super-resolution with sub-pixel convolution: PSNR by log10 of a loss, the whole model saved by pickle."""

import argparse
from math import log10

import torch
import torch.nn as nn
import torch.nn.init as init
import torch.optim as optim
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--upscale-factor", type=int, default=2)
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--crop", type=int, default=32)
parser.add_argument("--images", type=int, default=16)
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--lr", type=float, default=0.01)


class Crops(Dataset):
    def __init__(self, size, crop, factor):
        self.size, self.crop, self.factor = size, crop, factor

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        target = torch.rand(1, self.crop, self.crop, generator=torch.Generator().manual_seed(index))
        return nn.functional.avg_pool2d(target, self.factor), target


class Net(nn.Module):
    def __init__(self, upscale_factor):
        super().__init__()
        self.relu = nn.ReLU()
        self.conv1 = nn.Conv2d(1, 64, (5, 5), (1, 1), (2, 2))
        self.conv2 = nn.Conv2d(64, 64, (3, 3), (1, 1), (1, 1))
        self.conv3 = nn.Conv2d(64, 32, (3, 3), (1, 1), (1, 1))
        self.conv4 = nn.Conv2d(32, upscale_factor**2, (3, 3), (1, 1), (1, 1))
        self.pixel_shuffle = nn.PixelShuffle(upscale_factor)
        for conv in (self.conv1, self.conv2, self.conv3):
            init.orthogonal_(conv.weight, init.calculate_gain("relu"))
        init.orthogonal_(self.conv4.weight)

    def forward(self, x):
        x = self.relu(self.conv1(x))
        x = self.relu(self.conv2(x))
        x = self.relu(self.conv3(x))
        return self.pixel_shuffle(self.conv4(x))


def main():
    opt = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(123)
    data = Crops(opt.images, opt.crop, opt.upscale_factor)
    loader = DataLoader(dataset=data, num_workers=1, batch_size=opt.batch_size, shuffle=True)
    model = Net(upscale_factor=opt.upscale_factor).to(device)
    criterion = nn.MSELoss()
    optimizer = optim.Adam(model.parameters(), lr=opt.lr)
    for epoch in range(1, opt.epochs + 1):
        epoch_loss = 0
        for iteration, batch in enumerate(loader, 1):
            input, target = batch[0].to(device), batch[1].to(device)
            optimizer.zero_grad()
            loss = criterion(model(input), target)
            epoch_loss += loss.item()
            loss.backward()
            optimizer.step()
            print(f"===> Epoch[{epoch}]({iteration}/{len(loader)}): Loss: {loss.item():.4f}")
        avg_psnr = 0
        with torch.no_grad():
            for batch in loader:
                input, target = batch[0].to(device), batch[1].to(device)
                mse = criterion(model(input), target)
                avg_psnr += 10 * log10(1 / mse.item())
        print(f"===> Avg. PSNR: {avg_psnr / len(loader):.4f} dB, loss {epoch_loss / len(loader):.4f}")
        torch.save(model, f"model_epoch_{epoch}.pth")


if __name__ == "__main__":
    main()
