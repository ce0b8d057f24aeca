"""Denoising diffusion (DDPM) on small images: random timesteps, noise prediction, an EMA copy, ancestral sampling."""

import argparse
import copy
import math
import os

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--image-size", type=int, default=16)
parser.add_argument("--width", type=int, default=16)
parser.add_argument("--timesteps", type=int, default=20)
parser.add_argument("--train-size", type=int, default=16)
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--lr", type=float, default=2e-4)
parser.add_argument("--ema-decay", type=float, default=0.995)
parser.add_argument("--sample-every", type=int, default=2)
parser.add_argument("--num-samples", type=int, default=2)


class SinusoidalPositionEmbeddings(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim

    def forward(self, time):
        half_dim = self.dim // 2
        embeddings = math.log(10000) / (half_dim - 1)
        embeddings = torch.exp(torch.arange(half_dim, device=time.device) * -embeddings)
        embeddings = time[:, None] * embeddings[None, :]
        return torch.cat((embeddings.sin(), embeddings.cos()), dim=-1)


class ResBlock(nn.Module):
    def __init__(self, channels_in, channels_out, time_dim):
        super().__init__()
        self.norm1 = nn.GroupNorm(4, channels_in)
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, padding=1)
        self.time = nn.Linear(time_dim, 2 * channels_out)
        self.norm2 = nn.GroupNorm(4, channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1)
        self.skip = nn.Conv2d(channels_in, channels_out, 1) if channels_in != channels_out else nn.Identity()

    def forward(self, x, t):
        h = self.conv1(F.silu(self.norm1(x)))
        scale, shift = self.time(F.silu(t))[:, :, None, None].chunk(2, dim=1)
        h = self.norm2(h) * (scale + 1) + shift
        return self.conv2(F.silu(h)) + self.skip(x)


class SelfAttention(nn.Module):
    def __init__(self, channels, heads=4):
        super().__init__()
        self.heads = heads
        self.norm = nn.GroupNorm(1, channels)
        self.to_qkv = nn.Conv2d(channels, 3 * channels, 1, bias=False)
        self.to_out = nn.Conv2d(channels, channels, 1)

    def forward(self, x):
        b, c, h, w = x.shape
        q, k, v = self.to_qkv(self.norm(x)).view(b, 3, self.heads, c // self.heads, h * w).unbind(1)
        sim = torch.einsum("bhdi,bhdj->bhij", q * (c // self.heads) ** -0.5, k)
        attn = (sim - sim.amax(dim=-1, keepdim=True).detach()).softmax(dim=-1)
        out = torch.einsum("bhij,bhdj->bhdi", attn, v).reshape(b, c, h, w)
        return x + self.to_out(out)


class Unet(nn.Module):
    def __init__(self, width):
        super().__init__()
        time_dim = 4 * width
        self.time_mlp = nn.Sequential(
            SinusoidalPositionEmbeddings(width), nn.Linear(width, time_dim), nn.GELU(), nn.Linear(time_dim, time_dim)
        )
        self.init_conv = nn.Conv2d(3, width, 3, padding=1)
        self.down1 = ResBlock(width, 2 * width, time_dim)
        self.down2 = ResBlock(2 * width, 4 * width, time_dim)
        self.middle = ResBlock(4 * width, 4 * width, time_dim)
        self.attention = SelfAttention(4 * width)
        self.up2 = ResBlock(8 * width, 2 * width, time_dim)
        self.up1 = ResBlock(4 * width, width, time_dim)
        self.out = nn.Conv2d(width, 3, 1)

    def forward(self, x, time):
        t = self.time_mlp(time)
        h1 = self.down1(self.init_conv(x), t)
        h2 = self.down2(F.avg_pool2d(h1, 2), t)
        h = self.attention(self.middle(F.avg_pool2d(h2, 2), t))
        h = self.up2(torch.cat((F.interpolate(h, scale_factor=2, mode="nearest"), h2), dim=1), t)
        h = self.up1(torch.cat((F.interpolate(h, scale_factor=2, mode="nearest"), h1), dim=1), t)
        return self.out(h)


class Schedule:
    """The quantities of the forward process, on the device."""

    def __init__(self, timesteps, device):
        self.timesteps = timesteps
        self.betas = torch.linspace(1e-4, 0.02, timesteps, device=device)
        alphas = 1.0 - self.betas
        alphas_cumprod = torch.cumprod(alphas, dim=0)
        previous = F.pad(alphas_cumprod[:-1], (1, 0), value=1.0)
        self.sqrt_recip_alphas = torch.sqrt(1.0 / alphas)
        self.sqrt_alphas_cumprod = torch.sqrt(alphas_cumprod)
        self.sqrt_one_minus_alphas_cumprod = torch.sqrt(1.0 - alphas_cumprod)
        self.posterior_variance = self.betas * (1.0 - previous) / (1.0 - alphas_cumprod)

    def q_sample(self, x_start, t, noise):
        return (
            extract(self.sqrt_alphas_cumprod, t, x_start.shape) * x_start
            + extract(self.sqrt_one_minus_alphas_cumprod, t, x_start.shape) * noise
        )


def extract(a, t, x_shape):
    out = a.gather(-1, t)
    return out.reshape(t.shape[0], *((1,) * (len(x_shape) - 1))).to(t.device)


def p_losses(model, schedule, x_start):
    t = torch.randint(0, schedule.timesteps, (x_start.shape[0],), device=x_start.device).long()
    noise = torch.randn_like(x_start)
    predicted_noise = model(schedule.q_sample(x_start, t, noise), t)
    return F.smooth_l1_loss(noise, predicted_noise)


@torch.no_grad()
def p_sample(model, schedule, x, t, t_index):
    betas_t = extract(schedule.betas, t, x.shape)
    mean = extract(schedule.sqrt_recip_alphas, t, x.shape) * (
        x - betas_t * model(x, t) / extract(schedule.sqrt_one_minus_alphas_cumprod, t, x.shape)
    )
    if t_index == 0:
        return mean
    return mean + torch.sqrt(extract(schedule.posterior_variance, t, x.shape)) * torch.randn_like(x)


@torch.no_grad()
def sample(model, schedule, image_size, count):
    device = next(model.parameters()).device
    img = torch.randn((count, 3, image_size, image_size), device=device)
    imgs = []
    for i in reversed(range(schedule.timesteps)):
        img = p_sample(model, schedule, img, torch.full((count,), i, device=device, dtype=torch.long), i)
        imgs.append(img.cpu().numpy())
    return imgs


@torch.no_grad()
def update_ema(ema_model, model, decay):
    for ema_param, param in zip(ema_model.parameters(), model.parameters(), strict=True):
        ema_param.mul_(decay).add_(param, alpha=1 - decay)
    for ema_buffer, buffer in zip(ema_model.buffers(), model.buffers(), strict=True):
        ema_buffer.copy_(buffer)


def main():
    args = parser.parse_args()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    images = torch.rand(args.train_size, 3, args.image_size, args.image_size) * 2 - 1
    dataloader = DataLoader(TensorDataset(images), batch_size=args.batch_size, shuffle=True, drop_last=True)
    schedule = Schedule(args.timesteps, device)
    model = Unet(args.width).to(device)
    ema_model = copy.deepcopy(model).eval().requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    os.makedirs("samples", exist_ok=True)

    step = 0
    for epoch in range(args.epochs):
        for (batch,) in dataloader:
            optimizer.zero_grad()
            batch = batch.to(device)
            loss = p_losses(model, schedule, batch)
            if torch.isnan(loss):
                raise RuntimeError("loss is not a number")
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            update_ema(ema_model, model, args.ema_decay)
            step += 1
            print(f"epoch {epoch} step {step}: loss {loss.item():.4f}")
            if step % args.sample_every == 0:
                last = sample(ema_model, schedule, args.image_size, args.num_samples)[-1]
                pixels = ((last[0].transpose(1, 2, 0) + 1) * 127.5).clip(0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(f"samples/{step}.png")
    torch.save({"model": model.state_dict(), "ema": ema_model.state_dict(), "step": step}, "diffusion.pt")


if __name__ == "__main__":
    main()
