"""Proximal policy optimization in one file: vectorised environments, GAE, minibatch epochs, early stop on KL."""

import argparse
import time

import numpy as np
import torch
import torch.nn as nn
import torch.optim as optim
from torch.distributions.categorical import Categorical

parser = argparse.ArgumentParser()
parser.add_argument("--num-envs", type=int, default=4)
parser.add_argument("--num-steps", type=int, default=16)
parser.add_argument("--batch-size", type=int, default=16, help="size of a minibatch")
parser.add_argument("--update-epochs", type=int, default=2)
parser.add_argument("--num-iterations", type=int, default=2)
parser.add_argument("--observation-size", type=int, default=8)
parser.add_argument("--hidden", type=int, default=64)
parser.add_argument("--learning-rate", type=float, default=2.5e-4)
parser.add_argument("--no-anneal-lr", dest="anneal_lr", action="store_false")
parser.add_argument("--gamma", type=float, default=0.99)
parser.add_argument("--gae-lambda", type=float, default=0.95)
parser.add_argument("--clip-coef", type=float, default=0.2)
parser.add_argument("--ent-coef", type=float, default=0.01)
parser.add_argument("--vf-coef", type=float, default=0.5)
parser.add_argument("--max-grad-norm", type=float, default=0.5)
parser.add_argument("--target-kl", type=float, default=None)
parser.add_argument("--seed", type=int, default=1)

NUM_ACTIONS = 4


class VectorEnv:
    """Random walks of which one coordinate is to be steered to zero."""

    def __init__(self, num_envs, size, seed):
        self.rng = np.random.default_rng(seed)
        self.num_envs, self.size = num_envs, size

    def reset(self):
        self.state = self.rng.normal(size=(self.num_envs, self.size)).astype(np.float32)
        self.age = np.zeros(self.num_envs, dtype=np.int64)
        return self.state.copy(), {}

    def step(self, actions):
        self.state[:, 0] += 0.1 * (actions - 1.5)
        self.state[:, 1:] += 0.01 * self.rng.normal(size=(self.num_envs, self.size - 1))
        self.age += 1
        rewards = -np.abs(self.state[:, 0])
        done = (np.abs(self.state[:, 0]) > 3) | (self.age >= 50)
        info = {"episode_lengths": self.age[done].tolist()}
        self.state[done] = self.rng.normal(size=(int(done.sum()), self.size))
        self.age[done] = 0
        return self.state.copy(), rewards.astype(np.float32), done, info


def layer_init(layer, std=2**0.5, bias_const=0.0):
    torch.nn.init.orthogonal_(layer.weight, std)
    torch.nn.init.constant_(layer.bias, bias_const)
    return layer


class Agent(nn.Module):
    def __init__(self, size, hidden):
        super().__init__()
        self.critic = nn.Sequential(
            layer_init(nn.Linear(size, hidden)),
            nn.Tanh(),
            layer_init(nn.Linear(hidden, hidden)),
            nn.Tanh(),
            layer_init(nn.Linear(hidden, 1), std=1.0),
        )
        self.actor = nn.Sequential(
            layer_init(nn.Linear(size, hidden)),
            nn.Tanh(),
            layer_init(nn.Linear(hidden, hidden)),
            nn.Tanh(),
            layer_init(nn.Linear(hidden, NUM_ACTIONS), std=0.01),
        )

    def get_value(self, x):
        return self.critic(x)

    def get_action_and_value(self, x, action=None):
        logits = self.actor(x)
        probs = Categorical(logits=logits)
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(x)


def ppo_loss(agent, batch, args):
    """(loss, approximate KL divergence, share of clipped ratios) of one minibatch."""
    obs, actions, logprobs, advantages, returns = batch
    _, newlogprob, entropy, newvalue = agent.get_action_and_value(obs, actions.long())
    logratio = newlogprob - logprobs
    ratio = logratio.exp()
    with torch.no_grad():
        approx_kl = ((ratio - 1) - logratio).mean()
        clipfrac = ((ratio - 1.0).abs() > args.clip_coef).float().mean().item()
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    pg_loss1 = -advantages * ratio
    pg_loss2 = -advantages * torch.clamp(ratio, 1 - args.clip_coef, 1 + args.clip_coef)
    pg_loss = torch.max(pg_loss1, pg_loss2).mean()
    v_loss = 0.5 * ((newvalue.view(-1) - returns) ** 2).mean()
    loss = pg_loss - args.ent_coef * entropy.mean() + v_loss * args.vf_coef
    return loss, approx_kl, clipfrac


def main():
    args = parser.parse_args()
    batch_size = args.num_envs * args.num_steps
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    torch.backends.cudnn.deterministic = True
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    envs = VectorEnv(args.num_envs, args.observation_size, args.seed)
    agent = Agent(args.observation_size, args.hidden).to(device)
    optimizer = optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)

    obs = torch.zeros((args.num_steps, args.num_envs, args.observation_size)).to(device)
    actions = torch.zeros((args.num_steps, args.num_envs)).to(device)
    logprobs = torch.zeros((args.num_steps, args.num_envs)).to(device)
    rewards = torch.zeros((args.num_steps, args.num_envs)).to(device)
    dones = torch.zeros((args.num_steps, args.num_envs)).to(device)
    values = torch.zeros((args.num_steps, args.num_envs)).to(device)

    global_step = 0
    start_time = time.time()
    next_obs, _ = envs.reset()
    next_obs = torch.Tensor(next_obs).to(device)
    next_done = torch.zeros(args.num_envs).to(device)

    for iteration in range(1, args.num_iterations + 1):
        if args.anneal_lr:
            optimizer.param_groups[0]["lr"] = (1.0 - (iteration - 1.0) / args.num_iterations) * args.learning_rate

        for step in range(args.num_steps):
            global_step += args.num_envs
            obs[step] = next_obs
            dones[step] = next_done
            with torch.no_grad():
                action, logprob, _, value = agent.get_action_and_value(next_obs)
                values[step] = value.flatten()
            actions[step] = action
            logprobs[step] = logprob
            next_obs, reward, done, infos = envs.step(action.cpu().numpy())
            rewards[step] = torch.tensor(reward).to(device).view(-1)
            next_obs, next_done = torch.Tensor(next_obs).to(device), torch.Tensor(done).to(device)
            if infos["episode_lengths"]:
                print(f"global_step={global_step}, episodic_length={np.mean(infos['episode_lengths'])}")

        with torch.no_grad():
            next_value = agent.get_value(next_obs).reshape(1, -1)
            advantages = torch.zeros_like(rewards).to(device)
            lastgaelam = 0
            for t in reversed(range(args.num_steps)):
                if t == args.num_steps - 1:
                    nextnonterminal = 1.0 - next_done
                    nextvalues = next_value
                else:
                    nextnonterminal = 1.0 - dones[t + 1]
                    nextvalues = values[t + 1]
                delta = rewards[t] + args.gamma * nextvalues * nextnonterminal - values[t]
                lastgaelam = delta + args.gamma * args.gae_lambda * nextnonterminal * lastgaelam
                advantages[t] = lastgaelam
            returns = advantages + values

        b_obs = obs.reshape((-1, args.observation_size))
        b_logprobs = logprobs.reshape(-1)
        b_actions = actions.reshape(-1)
        b_advantages = advantages.reshape(-1)
        b_returns = returns.reshape(-1)
        b_values = values.reshape(-1)

        b_inds = np.arange(batch_size)
        clipfracs = []
        for _epoch in range(args.update_epochs):
            np.random.shuffle(b_inds)
            for start in range(0, batch_size, args.batch_size):
                mb_inds = b_inds[start : start + args.batch_size]
                minibatch = (
                    b_obs[mb_inds],
                    b_actions[mb_inds],
                    b_logprobs[mb_inds],
                    b_advantages[mb_inds],
                    b_returns[mb_inds],
                )
                loss, approx_kl, clipfrac = ppo_loss(agent, minibatch, args)
                clipfracs.append(clipfrac)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                optimizer.step()
            if args.target_kl is not None and approx_kl > args.target_kl:
                break

        y_pred, y_true = b_values.cpu().numpy(), b_returns.cpu().numpy()
        var_y = np.var(y_true)
        explained_var = np.nan if var_y == 0 else 1 - np.var(y_true - y_pred) / var_y
        finished = dones.bool()
        mean_at_end = rewards[finished].mean().item() if finished.any() else float("nan")
        print(
            f"iteration {iteration}: SPS {int(global_step / (time.time() - start_time))} loss {loss.item():.3f} "
            f"kl {approx_kl.item():.4f} clipfrac {np.mean(clipfracs):.3f} explained {explained_var:.3f} "
            f"reward at the end {mean_at_end:.3f}"
        )


if __name__ == "__main__":
    main()
