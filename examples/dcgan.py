"""A DCGAN: two models that train each other, two optimizers, and two passes over the lanes of each step.

python dcgan.py, or lockstep run -n 4 dcgan.py: the same fingerprint. If it is interrupted, start it again.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep

NOISE = 8


def make_images(count: int) -> TensorDataset:
    """8x8 images of one bright row or column."""
    images = torch.full((count, 1, 8, 8), -0.9)
    for number, image in enumerate(images):
        line = int(torch.randint(8, ()))
        (image[0, line] if number % 2 else image[0, :, line]).fill_(0.9)
    return TensorDataset(images + 0.05 * torch.randn_like(images))


def noise_like(images: torch.Tensor) -> torch.Tensor:
    return torch.randn(len(images), NOISE, 1, 1)


torch.manual_seed(0)
train = make_images(480)
generator = nn.Sequential(
    *(nn.ConvTranspose2d(NOISE, 16, 4), nn.BatchNorm2d(16), nn.ReLU()),
    *(nn.ConvTranspose2d(16, 1, 4, stride=2, padding=1), nn.Tanh()),
)
critic = nn.Sequential(
    *(nn.Conv2d(1, 16, 4, stride=2, padding=1), nn.LeakyReLU(0.2)),
    *(nn.Conv2d(16, 32, 4), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(32, 1)),
)
opt_generator = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
opt_critic = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.999))

models = {"generator": generator, "critic": critic}
run = lockstep.Run(models, opt_generator, opt_critic, lanes=6, checkpoint="checkpoints", every="10 steps")
for _epoch in run.epochs(10):
    for step in run.steps(train, global_batch=48, shuffle=True):
        opt_critic.zero_grad()
        for (real,) in step:  # the critic learns to tell real images from generated ones
            loss_real = F.softplus(-critic(real)).mean()
            loss_real.backward()
            with torch.no_grad():
                generated = generator(noise_like(real))
            loss_generated = F.softplus(critic(generated)).mean()
            loss_generated.backward()
            run.log(critic=loss_real + loss_generated)
        opt_critic.step()

        opt_generator.zero_grad()
        critic.requires_grad_(False)
        for (real,) in step:  # the generator learns to deceive the critic
            loss = F.softplus(-critic(generator(noise_like(real)))).mean()
            loss.backward()
            run.log(generator=loss)
        critic.requires_grad_(True)
        opt_generator.step()

if run.is_main:
    print(f"{run.step} steps, losses of the last epoch: {run.epoch_means}")
    print(run.fingerprint())
