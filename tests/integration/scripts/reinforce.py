"""REINFORCE on a small tracking task: one episode at a time, returns normalised, one update per episode."""

import argparse
from collections import deque
from itertools import count

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.distributions import Categorical

parser = argparse.ArgumentParser(description="REINFORCE")
parser.add_argument("--gamma", type=float, default=0.99)
parser.add_argument("--seed", type=int, default=543)
parser.add_argument("--episodes", type=int, default=4)
parser.add_argument("--horizon", type=int, default=20, help="steps of an episode")
parser.add_argument("--hidden", type=int, default=32)
parser.add_argument("--batch-size", type=int, default=1, help="episodes per update")
parser.add_argument("--log-interval", type=int, default=1)


class TrackingEnv:
    """Keep a point near a moving target by pushing it left or right."""

    observation_size = 4

    def __init__(self, horizon, seed):
        self.horizon = horizon
        self.rng = np.random.default_rng(seed)

    def reset(self):
        self.t = 0
        self.position, self.velocity = self.rng.normal(size=2)
        self.phase = self.rng.uniform(0, 2 * np.pi)
        return self._observe(), {}

    def _observe(self):
        target = np.sin(self.phase + 0.1 * self.t)
        return np.array([self.position, self.velocity, target, self.position - target], dtype=np.float32)

    def step(self, action):
        self.t += 1
        self.velocity = 0.9 * self.velocity + (0.1 if action == 1 else -0.1)
        self.position += self.velocity
        state = self._observe()
        return state, float(-abs(state[3])), False, self.t >= self.horizon, {}


class Policy(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.affine1 = nn.Linear(TrackingEnv.observation_size, hidden)
        self.dropout = nn.Dropout(p=0.1)
        self.affine2 = nn.Linear(hidden, hidden)
        self.affine3 = nn.Linear(hidden, 2)

        self.saved_log_probs = []
        self.rewards = []

    def forward(self, x):
        x = F.relu(self.dropout(self.affine1(x)))
        x = F.relu(self.affine2(x))
        return F.softmax(self.affine3(x), dim=1)


device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
eps = np.finfo(np.float32).eps.item()


def select_action(policy, state):
    state = torch.from_numpy(state).float().unsqueeze(0).to(device)
    probs = policy(state)
    m = Categorical(probs)
    action = m.sample()
    policy.saved_log_probs.append(m.log_prob(action))
    return action.item()


def finish_episode(policy, optimizer, gamma):
    R = 0
    policy_loss = []
    returns = deque()
    for r in policy.rewards[::-1]:
        R = r + gamma * R
        returns.appendleft(R)
    returns = torch.tensor(returns, device=device)
    returns = (returns - returns.mean()) / (returns.std() + eps)
    for log_prob, R in zip(policy.saved_log_probs, returns, strict=True):
        policy_loss.append(-log_prob * R)
    optimizer.zero_grad()
    policy_loss = torch.cat(policy_loss).sum()
    policy_loss.backward()
    optimizer.step()
    del policy.rewards[:]
    del policy.saved_log_probs[:]


def main():
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    env = TrackingEnv(args.horizon, args.seed)
    policy = Policy(args.hidden).to(device)
    optimizer = optim.Adam(policy.parameters(), lr=1e-2)
    running_reward = 10
    for i_episode in count(1):
        total = 0
        for _ in range(args.batch_size):
            state, _ = env.reset()
            ep_reward = 0
            for _t in range(1, 10000):  # Don't infinite loop while learning
                action = select_action(policy, state)
                state, reward, terminated, truncated, _ = env.step(action)
                policy.rewards.append(reward)
                ep_reward += reward
                if terminated or truncated:
                    break
            total += ep_reward
        running_reward = 0.05 * total / args.batch_size + (1 - 0.05) * running_reward
        finish_episode(policy, optimizer, args.gamma)
        if i_episode % args.log_interval == 0:
            print(f"Episode {i_episode}\tLast reward: {ep_reward:.2f}\tAverage reward: {running_reward:.2f}")
        if i_episode >= args.episodes:
            print("Finished")
            break


if __name__ == "__main__":
    main()
