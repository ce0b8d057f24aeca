"""Wasserstein GAN with gradient penalty and mixed precision: five critic steps for one of the generator."""

import argparse
import os

import numpy as np
import torch
import torch.autograd as autograd
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--n-epochs", type=int, default=1)
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--lr", type=float, default=0.0002)
parser.add_argument("--latent-dim", type=int, default=64)
parser.add_argument("--width", type=int, default=16)
parser.add_argument("--n-critic", type=int, default=5)
parser.add_argument("--lambda-gp", type=float, default=10)
parser.add_argument("--images", type=int, default=56)
parser.add_argument("--no-amp", dest="amp", action="store_false")

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Generator(nn.Module):
    def __init__(self, latent_dim, width):
        super().__init__()
        self.fc = nn.Linear(latent_dim, 4 * width * 64)
        self.net = nn.Sequential(
            nn.BatchNorm2d(4 * width),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(4 * width, 2 * width, 3, padding=1),
            nn.BatchNorm2d(2 * width),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(2 * width, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(width, 3, 3, padding=1),
            nn.Tanh(),
        )

    def forward(self, z):
        h = self.fc(z)
        return self.net(h.view(h.size(0), -1, 8, 8))


class Critic(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, width, 3, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width, 2 * width, 3, 2, 1),
            nn.InstanceNorm2d(2 * width, affine=True),
            nn.LeakyReLU(0.2),
            nn.Conv2d(2 * width, 4 * width, 3, 2, 1),
            nn.InstanceNorm2d(4 * width, affine=True),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            nn.Linear(4 * width * 16, 1),
        )

    def forward(self, x):
        return self.net(x)


def compute_gradient_penalty(critic, real_samples, fake_samples, scaler):
    alpha = torch.rand((real_samples.size(0), 1, 1, 1), device=device)
    interpolates = (alpha * real_samples + ((1 - alpha) * fake_samples)).requires_grad_(True)
    d_interpolates = critic(interpolates)
    # Scaled, so that small gradients survive half precision; the penalty needs them unscaled.
    gradients = autograd.grad(
        outputs=scaler.scale(d_interpolates),
        inputs=interpolates,
        grad_outputs=torch.ones_like(d_interpolates),
        create_graph=True,
        retain_graph=True,
        only_inputs=True,
    )[0]
    gradients = gradients * (1.0 / scaler.get_scale())
    gradients = gradients.view(gradients.size(0), -1).float()
    return ((gradients.norm(2, dim=1) - 1) ** 2).mean()


def main():
    opt = parser.parse_args()
    os.makedirs("images", exist_ok=True)
    use_amp = opt.amp and device.type == "cuda"
    images = torch.rand(opt.images, 3, 32, 32) * 2 - 1
    dataloader = DataLoader(TensorDataset(images), batch_size=opt.batch_size, shuffle=True, drop_last=True)
    generator, critic = Generator(opt.latent_dim, opt.width).to(device), Critic(opt.width).to(device)
    optimizer_G = torch.optim.Adam(generator.parameters(), lr=opt.lr, betas=(0.0, 0.9))
    optimizer_D = torch.optim.Adam(critic.parameters(), lr=opt.lr, betas=(0.0, 0.9))
    scaler_G = torch.amp.GradScaler(device.type, enabled=use_amp)
    scaler_D = torch.amp.GradScaler(device.type, enabled=use_amp)
    g_loss = torch.zeros(())
    for epoch in range(opt.n_epochs):
        for i, (real_imgs,) in enumerate(dataloader):
            real_imgs = real_imgs.to(device)
            optimizer_D.zero_grad()
            z = torch.randn(real_imgs.shape[0], opt.latent_dim, device=device)
            with torch.autocast(device.type, dtype=torch.float16, enabled=use_amp):
                fake_imgs = generator(z)
                real_validity = critic(real_imgs)
                fake_validity = critic(fake_imgs.detach())
                gradient_penalty = compute_gradient_penalty(critic, real_imgs, fake_imgs.detach(), scaler_D)
                d_loss = -torch.mean(real_validity) + torch.mean(fake_validity) + opt.lambda_gp * gradient_penalty
            scaler_D.scale(d_loss).backward()
            scaler_D.step(optimizer_D)
            scaler_D.update()

            if i % opt.n_critic == 0:
                optimizer_G.zero_grad()
                with torch.autocast(device.type, dtype=torch.float16, enabled=use_amp):
                    fake_imgs = generator(z)
                    g_loss = -torch.mean(critic(fake_imgs))
                scaler_G.scale(g_loss).backward()
                scaler_G.step(optimizer_G)
                scaler_G.update()
                np.save(f"images/{epoch}_{i}.npy", fake_imgs[:4].detach().float().cpu().numpy())
            print(f"[Epoch {epoch}] [Batch {i}/{len(dataloader)}] [D {d_loss.item():.4f}] [G {g_loss.item():.4f}]")


if __name__ == "__main__":
    main()
