"""Fast neural style: a transformer network trained against features of a frozen one, with helper modules."""

import argparse
import time
from collections import namedtuple

import numpy as np
import torch
from torch.optim import Adam
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=2)
parser.add_argument("--image-size", type=int, default=64)
parser.add_argument("--images", type=int, default=8)
parser.add_argument("--width", type=int, default=8)
parser.add_argument("--content-weight", type=float, default=1e5)
parser.add_argument("--style-weight", type=float, default=1e10)


class Features(torch.nn.Module):
    def __init__(self, width, requires_grad=False):
        super().__init__()
        self.slices = torch.nn.ModuleList()
        channels = 3
        for step in range(4):
            out = width * 2**step
            self.slices.append(
                torch.nn.Sequential(
                    torch.nn.Conv2d(channels, out, 3, padding=1),
                    torch.nn.ReLU(inplace=True),
                    torch.nn.MaxPool2d(2) if step else torch.nn.Identity(),
                )
            )
            channels = out
        if not requires_grad:
            for param in self.parameters():
                param.requires_grad = False

    def forward(self, x):
        outputs = []
        for part in self.slices:
            x = part(x)
            outputs.append(x)
        return namedtuple("FeatureOutputs", ["relu1_2", "relu2_2", "relu3_3", "relu4_3"])(*outputs)


class ConvLayer(torch.nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, stride, upsample=None):
        super().__init__()
        self.upsample = upsample
        self.reflection_pad = torch.nn.ReflectionPad2d(kernel_size // 2)
        self.conv2d = torch.nn.Conv2d(in_channels, out_channels, kernel_size, stride)

    def forward(self, x):
        if self.upsample:
            x = torch.nn.functional.interpolate(x, mode="nearest", scale_factor=self.upsample)
        return self.conv2d(self.reflection_pad(x))


class ResidualBlock(torch.nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1, self.conv2 = (ConvLayer(channels, channels, 3, 1) for _ in range(2))
        self.in1, self.in2 = (torch.nn.InstanceNorm2d(channels, affine=True) for _ in range(2))
        self.relu = torch.nn.ReLU()

    def forward(self, x):
        residual = x
        out = self.relu(self.in1(self.conv1(x)))
        return self.in2(self.conv2(out)) + residual


class TransformerNet(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.down = torch.nn.ModuleList(
            [ConvLayer(3, width, 9, 1), ConvLayer(width, 2 * width, 3, 2), ConvLayer(2 * width, 4 * width, 3, 2)]
        )
        self.norms = torch.nn.ModuleList([torch.nn.InstanceNorm2d(width * 2**i, affine=True) for i in range(3)])
        self.blocks = torch.nn.Sequential(*[ResidualBlock(4 * width) for _ in range(2)])
        self.up1 = ConvLayer(4 * width, 2 * width, 3, 1, upsample=2)
        self.up2 = ConvLayer(2 * width, width, 3, 1, upsample=2)
        self.out = ConvLayer(width, 3, 9, 1)

    def forward(self, x):
        for conv, norm in zip(self.down, self.norms, strict=True):
            x = torch.relu(norm(conv(x)))
        x = self.blocks(x)
        return self.out(torch.relu(self.up2(torch.relu(self.up1(x)))))


def gram_matrix(y):
    (b, ch, h, w) = y.size()
    features = y.view(b, ch, w * h)
    return features.bmm(features.transpose(1, 2)) / (ch * h * w)


def normalize_batch(batch):
    mean = batch.new_tensor([0.485, 0.456, 0.406]).view(-1, 1, 1)
    std = batch.new_tensor([0.229, 0.224, 0.225]).view(-1, 1, 1)
    return (batch.div_(255.0) - mean) / std


def main():
    args = parser.parse_args()
    np.random.seed(42)
    torch.manual_seed(42)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = TensorDataset(
        torch.rand(args.images, 3, args.image_size, args.image_size).mul(255), torch.zeros(args.images)
    )
    train_loader = DataLoader(data, batch_size=args.batch_size)
    transformer = TransformerNet(args.width).to(device)
    optimizer = Adam(transformer.parameters(), 1e-3)
    mse_loss = torch.nn.MSELoss()
    vgg = Features(args.width, requires_grad=False).to(device)
    style = torch.rand(3, args.image_size, args.image_size).mul(255).repeat(args.batch_size, 1, 1, 1).to(device)
    gram_style = [gram_matrix(y) for y in vgg(normalize_batch(style))]
    transformer.train()
    agg_content_loss = agg_style_loss = 0.0
    for batch_id, (x, _) in enumerate(train_loader):
        n_batch = len(x)
        optimizer.zero_grad()
        x = x.to(device)
        y = transformer(x)
        y, x = normalize_batch(y), normalize_batch(x)
        features_y, features_x = vgg(y), vgg(x)
        content_loss = args.content_weight * mse_loss(features_y.relu2_2, features_x.relu2_2)
        style_loss = 0.0
        for ft_y, gm_s in zip(features_y, gram_style, strict=True):
            style_loss += mse_loss(gram_matrix(ft_y), gm_s[:n_batch, :, :])
        style_loss *= args.style_weight
        total_loss = content_loss + style_loss
        total_loss.backward()
        optimizer.step()
        agg_content_loss += content_loss.item()
        agg_style_loss += style_loss.item()
        print(
            f"{time.ctime()}\t[{batch_id + 1}/{len(train_loader)}]\tcontent: {agg_content_loss / (batch_id + 1):.6f}"
            f"\tstyle: {agg_style_loss / (batch_id + 1):.6f}"
        )
    transformer.eval().cpu()
    torch.save(transformer.state_dict(), "style.model")
    transformer.to(device).train()


if __name__ == "__main__":
    main()
