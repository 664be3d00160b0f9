"""Actor and critic: a policy learns to balance a pole, and a second network learns how well each position will end.

A sample is the seed of an episode. In each step the critic learns from the episodes first, then the policy with the new critic.
python actor_critic.py, or lockstep run -n 4 actor_critic.py: the same fingerprint. If it is interrupted, start it again.
"""

import torch
from torch import Tensor, nn

import lockstep

LENGTH, DISCOUNT = 12, 0.9


def begin(seeds: Tensor) -> Tensor:
    """Return the first (angle, speed) of each episode."""
    return torch.stack([torch.sin(seeds * 12.9898), torch.cos(seeds * 78.233)], dim=1) * 0.2


def move(state: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    """Push the pole to the left (0) or to the right (1). Returns the next state and the reward."""
    angle, speed = state.unbind(1)
    speed = speed + 0.3 * angle + 0.15 * (2 * action - 1) + 0.01 * torch.randn_like(speed)
    angle = (angle + 0.3 * speed).clamp(-2, 2)
    return torch.stack([angle, speed], dim=1), 1 - angle.abs()


def play(seeds: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Play one episode for each seed. Returns states, log-probabilities of the actions, and discounted returns."""
    state, states, chances, rewards = begin(seeds.float()), [], [], []
    for _ in range(LENGTH):
        choice = torch.distributions.Categorical(logits=actor(state))
        action = choice.sample()
        states.append(state)
        chances.append(choice.log_prob(action))
        state, reward = move(state, action)
        rewards.append(reward)
    total, returns = torch.zeros(len(seeds)), []
    for reward in reversed(rewards):
        total = reward + DISCOUNT * total
        returns.insert(0, total)
    return torch.stack(states), torch.stack(chances), torch.stack(returns)


torch.manual_seed(0)
actor = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))
critic = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))
opt_actor = torch.optim.Adam(actor.parameters(), lr=1e-2)
opt_critic = torch.optim.Adam(critic.parameters(), lr=2e-2)

run = lockstep.Run([actor, critic], opt_actor, opt_critic, lanes=6, checkpoint="checkpoints", every="10 steps")
for step in run.steps(range(2880), global_batch=48, shuffle=True):
    for seeds in step:
        with torch.no_grad():
            states, _, returns = play(seeds)
        loss = (critic(states).squeeze(-1) - returns).square().mean()
        loss.backward()
        run.log(critic=loss, reward=returns[0].mean())
    opt_critic.step()

    for seeds in step:
        states, chances, returns = play(seeds)
        advantage = returns - critic(states).squeeze(-1).detach()
        (-chances * advantage).mean().backward()
    nn.utils.clip_grad_norm_(actor.parameters(), 1.0)
    opt_actor.step()

if run.is_main:
    print(f"{run.step} steps, return {run.logged['reward']:.2f} (at best {(1 - DISCOUNT**LENGTH) / (1 - DISCOUNT):.2f})")
    print(run.fingerprint())
