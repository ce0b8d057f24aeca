"""A fully connected GAN in the manner of scripts from before PyTorch 0.4: Variable, Tensor aliases, .type(Tensor)."""

import argparse
import os

import numpy as np
import torch
import torch.nn as nn
from PIL import Image
from torch.autograd import Variable
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--n-epochs", type=int, default=1)
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--lr", type=float, default=0.0002)
parser.add_argument("--b1", type=float, default=0.5)
parser.add_argument("--b2", type=float, default=0.999)
parser.add_argument("--n-cpu", type=int, default=0)
parser.add_argument("--latent-dim", type=int, default=100)
parser.add_argument("--img-size", type=int, default=28)
parser.add_argument("--channels", type=int, default=1)
parser.add_argument("--n-samples", type=int, default=24)
parser.add_argument("--sample-interval", type=int, default=2)

cuda = bool(torch.cuda.is_available())


class Generator(nn.Module):
    def __init__(self, latent_dim, img_shape):
        super().__init__()
        self.img_shape = img_shape

        def block(in_feat, out_feat, normalize=True):
            layers = [nn.Linear(in_feat, out_feat)]
            if normalize:
                layers.append(nn.BatchNorm1d(out_feat, 0.8))
            layers.append(nn.LeakyReLU(0.2, inplace=True))
            return layers

        self.model = nn.Sequential(
            *block(latent_dim, 128, normalize=False),
            *block(128, 256),
            *block(256, 512),
            *block(512, 1024),
            nn.Linear(1024, int(np.prod(img_shape))),
            nn.Tanh(),
        )

    def forward(self, z):
        img = self.model(z)
        return img.view(img.size(0), *self.img_shape)


class Discriminator(nn.Module):
    def __init__(self, img_shape):
        super().__init__()
        self.model = nn.Sequential(
            nn.Linear(int(np.prod(img_shape)), 512),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Linear(512, 256),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Linear(256, 1),
            nn.Sigmoid(),
        )

    def forward(self, img):
        return self.model(img.view(img.size(0), -1))


class Digits(Dataset):
    """Blurred blobs as bytes, as a data set of digits would come."""

    def __init__(self, n_samples, shape):
        rng = np.random.RandomState(0)
        self.images = rng.randint(0, 256, size=(n_samples, *shape)).astype(np.uint8)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return torch.from_numpy(self.images[index]).double() / 127.5 - 1.0, index % 10


def save_grid(tensor, path, nrow=5):
    images = tensor.data.cpu().numpy()
    images = ((images + 1) * 127.5).clip(0, 255).astype(np.uint8)
    rows = [np.concatenate(list(images[r : r + nrow, 0]), axis=1) for r in range(0, len(images), nrow)]
    width = rows[0].shape[1]
    Image.fromarray(np.concatenate([r for r in rows if r.shape[1] == width], axis=0)).save(path)


def main():
    opt = parser.parse_args()
    print(opt)
    os.makedirs("images", exist_ok=True)
    img_shape = (opt.channels, opt.img_size, opt.img_size)

    adversarial_loss = torch.nn.BCELoss()
    generator = Generator(opt.latent_dim, img_shape)
    discriminator = Discriminator(img_shape)
    if cuda:
        generator.cuda()
        discriminator.cuda()
        adversarial_loss.cuda()

    dataloader = DataLoader(
        Digits(opt.n_samples, img_shape), batch_size=opt.batch_size, shuffle=True, num_workers=opt.n_cpu
    )
    optimizer_G = torch.optim.Adam(generator.parameters(), lr=opt.lr, betas=(opt.b1, opt.b2))
    optimizer_D = torch.optim.Adam(discriminator.parameters(), lr=opt.lr, betas=(opt.b1, opt.b2))

    Tensor = torch.cuda.FloatTensor if cuda else torch.FloatTensor

    for epoch in range(opt.n_epochs):
        for i, (imgs, _) in enumerate(dataloader):
            valid = Variable(Tensor(imgs.size(0), 1).fill_(1.0), requires_grad=False)
            fake = Variable(Tensor(imgs.size(0), 1).fill_(0.0), requires_grad=False)
            real_imgs = Variable(imgs.type(Tensor))

            optimizer_G.zero_grad()
            z = Variable(Tensor(np.random.normal(0, 1, (imgs.shape[0], opt.latent_dim))))
            gen_imgs = generator(z)
            g_loss = adversarial_loss(discriminator(gen_imgs), valid)
            g_loss.backward()
            optimizer_G.step()

            optimizer_D.zero_grad()
            real_loss = adversarial_loss(discriminator(real_imgs), valid)
            fake_loss = adversarial_loss(discriminator(gen_imgs.detach()), fake)
            d_loss = (real_loss + fake_loss) / 2
            d_loss.backward()
            optimizer_D.step()

            print(
                "[Epoch %d/%d] [Batch %d/%d] [D loss: %f] [G loss: %f]"  # noqa: UP031 - the style of its time
                % (epoch, opt.n_epochs, i, len(dataloader), d_loss.item(), g_loss.data)
            )
            batches_done = epoch * len(dataloader) + i
            if batches_done % opt.sample_interval == 0:
                save_grid(gen_imgs.data[:25], f"images/{batches_done}.png")


if __name__ == "__main__":
    main()
