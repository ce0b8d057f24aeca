"""Neural style transfer: the pixels of an image are optimized by L-BFGS against features of a frozen network."""

import argparse
import copy

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from PIL import Image

parser = argparse.ArgumentParser()
parser.add_argument("--image-size", type=int, default=64)
parser.add_argument("--batch-size", type=int, default=1)
parser.add_argument("--width", type=int, default=16)
parser.add_argument("--num-steps", type=int, default=40)
parser.add_argument("--style-weight", type=float, default=1e6)
parser.add_argument("--content-weight", type=float, default=1)

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def vgg_like(width):
    layers, channels = [], 3
    for out, count in ((width, 2), (2 * width, 2), (4 * width, 2)):
        for _ in range(count):
            layers += [nn.Conv2d(channels, out, 3, padding=1), nn.ReLU(inplace=False)]
            channels = out
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers)


class ContentLoss(nn.Module):
    def __init__(self, target):
        super().__init__()
        self.target = target.detach()

    def forward(self, input):
        self.loss = F.mse_loss(input, self.target)
        return input


def gram_matrix(input):
    a, b, c, d = input.size()
    features = input.view(a * b, c * d)
    G = torch.mm(features, features.t())
    return G.div(a * b * c * d)


class StyleLoss(nn.Module):
    def __init__(self, target_feature):
        super().__init__()
        self.target = gram_matrix(target_feature).detach()

    def forward(self, input):
        G = gram_matrix(input)
        self.loss = F.mse_loss(G, self.target)
        return input


class Normalization(nn.Module):
    def __init__(self, mean, std):
        super().__init__()
        self.mean = mean.detach().clone().view(-1, 1, 1)
        self.std = std.detach().clone().view(-1, 1, 1)

    def forward(self, img):
        return (img - self.mean) / self.std


def get_style_model_and_losses(cnn, style_img, content_img):
    mean = torch.tensor([0.485, 0.456, 0.406]).to(device)
    std = torch.tensor([0.229, 0.224, 0.225]).to(device)
    content_layers, style_layers = ["conv_4"], ["conv_1", "conv_2", "conv_3", "conv_4", "conv_5"]
    content_losses, style_losses = [], []
    model = nn.Sequential(Normalization(mean, std))
    i = 0
    for layer in copy.deepcopy(cnn).children():
        if isinstance(layer, nn.Conv2d):
            i += 1
            name = f"conv_{i}"
        elif isinstance(layer, nn.ReLU):
            name = f"relu_{i}"
        elif isinstance(layer, nn.MaxPool2d):
            name = f"pool_{i}"
        else:
            raise RuntimeError(f"Unrecognized layer: {layer.__class__.__name__}")
        model.add_module(name, layer)
        if name in content_layers:
            content_loss = ContentLoss(model(content_img).detach())
            model.add_module(f"content_loss_{i}", content_loss)
            content_losses.append(content_loss)
        if name in style_layers:
            style_loss = StyleLoss(model(style_img).detach())
            model.add_module(f"style_loss_{i}", style_loss)
            style_losses.append(style_loss)
    for i in range(len(model) - 1, -1, -1):
        if isinstance(model[i], (ContentLoss, StyleLoss)):
            break
    return model[: (i + 1)], style_losses, content_losses


def run_style_transfer(cnn, content_img, style_img, input_img, args):
    print("Building the style transfer model..")
    model, style_losses, content_losses = get_style_model_and_losses(cnn, style_img, content_img)
    input_img.requires_grad_(True)
    model.eval()
    model.requires_grad_(False)
    optimizer = optim.LBFGS([input_img])
    print("Optimizing..")
    run = [0]
    while run[0] <= args.num_steps:

        def closure():
            with torch.no_grad():
                input_img.clamp_(0, 1)
            optimizer.zero_grad()
            model(input_img)
            style_score = 0
            content_score = 0
            for sl in style_losses:
                style_score += sl.loss
            for cl in content_losses:
                content_score += cl.loss
            style_score *= args.style_weight
            content_score *= args.content_weight
            loss = style_score + content_score
            loss.backward()
            run[0] += 1
            if run[0] % 10 == 0:
                print(f"run {run}: Style Loss : {style_score.item():4f} Content Loss: {content_score.item():4f}")
            return style_score + content_score

        optimizer.step(closure)
    with torch.no_grad():
        input_img.clamp_(0, 1)
    return input_img


def main():
    args = parser.parse_args()
    torch.manual_seed(0)
    cnn = vgg_like(args.width).to(device).eval()
    rng = np.random.default_rng(0)
    size = (args.batch_size, 3, args.image_size, args.image_size)
    style_img, content_img = (torch.from_numpy(rng.random(size)).to(device, torch.float) for _ in range(2))
    assert style_img.size() == content_img.size(), "style and content images must be of the same size"
    output = run_style_transfer(cnn, content_img, style_img, content_img.clone(), args)
    pixels = (output.detach().cpu().squeeze(0).permute(1, 2, 0).numpy() * 255).astype(np.uint8)
    Image.fromarray(pixels).save("output.png")


if __name__ == "__main__":
    main()
