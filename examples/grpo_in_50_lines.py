"""GRPO in 50 lines: a tiny transformer with random weights learns from rewards to count down to 0."""

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

P, Q, G, T, V, END = 16, 1, 16, 9, 10, 0  # P prompts of Q digits, G completions of up to T each, B = P·G, V digits; 0 ends one


def sample(model: nn.Module, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Sample T tokens from the policy. The mask is False after the first END, where the completion is over."""
    for _ in range(T):
        ids = torch.cat((ids, model(ids).logits[:, -1].softmax(-1).multinomial(1)), 1)
    ends_BT = (ids[:, -T:] == END).int()
    return ids[:, -T:], ends_BT.cumsum(1) - ends_BT == 0


def logps(model: nn.Module, prompt_BQ: Tensor, completion_BT: Tensor) -> Tensor:
    """log π(token | everything before it) for each token of the completions."""
    logits_BTV: Tensor = model(torch.cat((prompt_BQ, completion_BT), 1)).logits[:, prompt_BQ.shape[1] - 1 : -1]
    return logits_BTV.log_softmax(-1).gather(2, completion_BT[..., None])[..., 0]


def grpo_loss(new_BT: Tensor, old_BT: Tensor, ref_BT: Tensor, reward_PG: Tensor, mask_BT: Tensor, beta: float) -> Tensor:
    """Advantages relative to the group; better completions become likelier, clipped to ± 20 %, minus β times the KL (k3)."""
    advantage_PG = (reward_PG - reward_PG.mean(1, keepdim=True)) / (reward_PG.std(1, keepdim=True) + 1e-4)
    advantage_B1, ratio_BT, d_BT = advantage_PG.view(-1, 1), (new_BT - old_BT).exp(), ref_BT - new_BT
    gain_BT = torch.minimum(ratio_BT * advantage_B1, ratio_BT.clamp(0.8, 1.2) * advantage_B1) - beta * (d_BT.exp() - d_BT - 1)
    return -((gain_BT * mask_BT).sum(1) / mask_BT.sum(1)).mean()


if __name__ == "__main__":
    torch.manual_seed(0)
    size = LlamaConfig(vocab_size=V, hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4)
    model, reference = LlamaForCausalLM(size), LlamaForCausalLM(size)
    reference.load_state_dict(model.state_dict())
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(101):
        prompt_BQ = torch.randint(1, V, (P, Q)).repeat_interleave(G, 0)
        with torch.no_grad():
            completion_BT, mask_BT = sample(model, prompt_BQ)
            old_BT, ref_BT = (logps(one, prompt_BQ, completion_BT) for one in (model, reference))
        right_BT = completion_BT == prompt_BQ - torch.arange(1, T + 1)
        reward_PG = (right_BT.cumprod(1).sum(1) / prompt_BQ[:, 0]).view(P, G)  # fraction right before the first mistake
        for _ in range(2):
            adam.zero_grad()
            grpo_loss(logps(model, prompt_BQ, completion_BT), old_BT, ref_BT, reward_PG, mask_BT, beta=0.001).backward()
            adam.step()
        if step % 10 == 0:
            print(f"step {step:3} reward {reward_PG.mean():.2f}  {int(prompt_BQ[0])} → {completion_BT[0][mask_BT[0]].tolist()}")
