"""Actor-critic with two heads: saved actions as named tuples, smooth L1 for the value, one update per episode."""

import argparse
from collections import namedtuple

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.distributions import Normal

parser = argparse.ArgumentParser()
parser.add_argument("--gamma", type=float, default=0.99)
parser.add_argument("--batch-size", type=int, default=1, help="episodes per update")
parser.add_argument("--episodes", type=int, default=4)
parser.add_argument("--hidden", type=int, default=32)

SavedAction = namedtuple("SavedAction", ["log_prob", "value"])
device = "cuda:0" if torch.cuda.device_count() > 0 else "cpu"
eps = np.finfo(np.float32).eps.item()


class Pendulum:
    """A pendulum to be swung up; its episode ends when it falls far or after fifty steps."""

    def reset(self):
        self.angle, self.speed, self.t = np.random.uniform(-1, 1), 0.0, 0
        return self.observe()

    def observe(self):
        return np.array([np.cos(self.angle), np.sin(self.angle), self.speed])

    def step(self, torque):
        self.speed += 0.05 * (np.sin(self.angle) + float(np.clip(torque, -2, 2)))
        self.angle += 0.05 * self.speed
        self.t += 1
        return self.observe(), -(self.angle**2), abs(self.angle) > 2 or self.t >= 50


class Policy(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.affine1 = nn.Linear(3, hidden)
        self.mean_head = nn.Linear(hidden, 1)
        self.log_std = nn.Parameter(torch.zeros(1))
        self.value_head = nn.Linear(hidden, 1)
        self.saved_actions = []
        self.rewards = []

    def forward(self, x):
        x = F.relu(self.affine1(x))
        return self.mean_head(x), self.log_std.exp().expand_as(x[..., :1]), self.value_head(x)


def select_action(model, state):
    state = torch.from_numpy(state).float().to(device)
    mean, std, state_value = model(state)
    m = Normal(mean, std)
    action = m.sample()
    model.saved_actions.append(SavedAction(m.log_prob(action).sum(), state_value))
    return action.detach().cpu().numpy()[0]


def finish_episode(model, optimizer, gamma):
    R = 0
    returns = []
    for r in model.rewards[::-1]:
        R = r + gamma * R
        returns.insert(0, R)
    returns = torch.tensor(returns, dtype=torch.float32)
    returns = (returns - returns.mean()) / (returns.std() + eps)
    policy_losses, value_losses = [], []
    for (log_prob, value), R in zip(model.saved_actions, returns, strict=True):
        advantage = R - value.item()
        policy_losses.append(-log_prob * advantage)
        value_losses.append(F.smooth_l1_loss(value, torch.tensor([R]).to(device)))
    optimizer.zero_grad()
    loss = torch.stack(policy_losses).sum() + torch.stack(value_losses).sum()
    loss.backward()
    if any(not torch.isfinite(p.grad).all() for p in model.parameters()):
        raise FloatingPointError("gradients are not finite")
    optimizer.step()
    del model.rewards[:]
    del model.saved_actions[:]


def main():
    args = parser.parse_args()
    np.random.seed(0)
    torch.manual_seed(0)
    env, model = Pendulum(), Policy(args.hidden).to(device)
    optimizer = optim.Adam(model.parameters(), lr=3e-2)
    running_reward = 10
    for i_episode in range(args.episodes):
        for _ in range(args.batch_size):
            state, ep_reward, done = env.reset(), 0, False
            while not done:
                state, reward, done = env.step(select_action(model, state))
                model.rewards.append(reward)
                ep_reward += reward
        running_reward = 0.05 * ep_reward + (1 - 0.05) * running_reward
        finish_episode(model, optimizer, args.gamma)
        print(f"Episode {i_episode}\tLast reward: {ep_reward:.2f}\tAverage reward: {running_reward:.2f}")


if __name__ == "__main__":
    main()
