"""Deep Q-learning from stacked frames: replay buffer on the host, target network, epsilon-greedy exploration."""

import argparse
import math
import random
from collections import deque, namedtuple

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--frame-size", type=int, default=84)
parser.add_argument("--speed", type=int, default=12, help="pixels the ball falls per step")
parser.add_argument("--memory-size", type=int, default=1000)
parser.add_argument("--learning-starts", type=int, default=16)
parser.add_argument("--total-steps", type=int, default=24)
parser.add_argument("--target-update", type=int, default=4)
parser.add_argument("--tau", type=float, default=0.005, help="share of the soft update; 1 copies the network")
parser.add_argument("--gamma", type=float, default=0.99)
parser.add_argument("--lr", type=float, default=1e-4)

Transition = namedtuple("Transition", ("state", "action", "next_state", "reward"))

device = torch.device("cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu")


class CatchEnv:
    """A ball falls; a paddle at the bottom moves left, stays or moves right. The observation is four frames."""

    num_actions = 3

    def __init__(self, size, speed, seed=0):
        self.size, self.speed = size, speed
        self.rng = np.random.default_rng(seed)

    def reset(self):
        self.ball = [0, int(self.rng.integers(self.size))]
        self.paddle = self.size // 2
        self.frames = deque([self._draw()] * 4, maxlen=4)
        return np.stack(self.frames)

    def _draw(self):
        frame = np.zeros((self.size, self.size), dtype=np.uint8)
        frame[self.ball[0], self.ball[1]] = 255
        frame[-1, max(0, self.paddle - 3) : self.paddle + 3] = 128
        return frame

    def step(self, action):
        self.paddle = int(np.clip(self.paddle + 4 * (action - 1), 0, self.size - 1))
        self.ball[0] += self.speed
        done = self.ball[0] >= self.size - 1
        self.ball[0] = min(self.ball[0], self.size - 1)
        reward = (1.0 if abs(self.ball[1] - self.paddle) < 4 else -1.0) if done else 0.0
        self.frames.append(self._draw())
        return np.stack(self.frames), reward, done


class ReplayMemory:
    def __init__(self, capacity):
        self.memory = deque(maxlen=capacity)

    def push(self, *args):
        self.memory.append(Transition(*args))

    def sample(self, batch_size):
        return random.choices(self.memory, k=batch_size)

    def __len__(self):
        return len(self.memory)


class DQN(nn.Module):
    def __init__(self, frame_size, n_actions):
        super().__init__()
        self.conv1 = nn.Conv2d(4, 32, 8, stride=4)
        self.conv2 = nn.Conv2d(32, 64, 4, stride=2)
        self.conv3 = nn.Conv2d(64, 64, 3, stride=1)
        side = ((frame_size - 8) // 4 + 1 - 4) // 2 + 1 - 2
        self.fc1 = nn.Linear(64 * side * side, 512)
        self.fc2 = nn.Linear(512, n_actions)

    def forward(self, x):
        x = x.float() / 255.0
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = F.relu(self.conv3(x))
        x = F.relu(self.fc1(x.flatten(1)))
        return self.fc2(x)


def main():
    args = parser.parse_args()
    random.seed(0)
    torch.manual_seed(0)
    env = CatchEnv(args.frame_size, args.speed)
    policy_net = DQN(args.frame_size, env.num_actions).to(device)
    target_net = DQN(args.frame_size, env.num_actions).to(device)
    target_net.load_state_dict(policy_net.state_dict())
    target_net.eval()
    optimizer = optim.AdamW(policy_net.parameters(), lr=args.lr, amsgrad=True)
    memory = ReplayMemory(args.memory_size)
    losses = []

    def select_action(state, step):
        eps_threshold = 0.05 + 0.85 * math.exp(-1.0 * step / 1000)
        if random.random() > eps_threshold:
            with torch.no_grad():
                # max(1) gives the largest column value of each row and its index.
                return policy_net(torch.from_numpy(state).unsqueeze(0).to(device)).max(1).indices.item()
        return random.randrange(env.num_actions)

    def optimize_model():
        if len(memory) < args.learning_starts:
            return
        batch = Transition(*zip(*memory.sample(args.batch_size), strict=True))
        non_final_mask = torch.tensor(tuple(s is not None for s in batch.next_state), device=device, dtype=torch.bool)
        non_final_next_states = torch.from_numpy(np.stack([s for s in batch.next_state if s is not None])).to(device)
        state_batch = torch.from_numpy(np.stack(batch.state)).to(device)
        action_batch = torch.tensor(batch.action, device=device).unsqueeze(1)
        reward_batch = torch.tensor(batch.reward, device=device, dtype=torch.float32)

        state_action_values = policy_net(state_batch).gather(1, action_batch)
        next_state_values = torch.zeros(args.batch_size, device=device)
        with torch.no_grad():
            next_state_values[non_final_mask] = target_net(non_final_next_states).max(1).values
        expected_state_action_values = (next_state_values * args.gamma) + reward_batch

        loss = nn.SmoothL1Loss()(state_action_values, expected_state_action_values.unsqueeze(1))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_value_(policy_net.parameters(), 100)
        optimizer.step()
        losses.append(loss.detach().cpu().numpy())

    state = env.reset()
    episode_reward = 0.0
    for step in range(args.total_steps):
        action = select_action(state, step)
        next_state, reward, done = env.step(action)
        memory.push(state, action, None if done else next_state, reward)
        episode_reward += reward
        state = next_state
        optimize_model()

        if step % args.target_update == 0:
            target_state = target_net.state_dict()
            policy_state = policy_net.state_dict()
            for key in policy_state:
                target_state[key] = policy_state[key] * args.tau + target_state[key] * (1 - args.tau)
            target_net.load_state_dict(target_state)
        if done:
            mean = float(np.mean(losses[-10:])) if losses else float("nan")
            print(f"step {step}: episode reward {episode_reward:.1f}, mean loss {mean:.4f}")
            episode_reward = 0.0
            state = env.reset()
    torch.save(policy_net.state_dict(), "dqn.pt")


if __name__ == "__main__":
    main()
