"""Trains a reward model on pairs of answers and writes it to reward-model/: the policy's model with one output.

The pairs prefer a short answer to a long one. Only the output layer is trained (Bradley and Terry's loss), on the last
token's hidden state: some seconds on a CPU.
"""

import json
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

MODEL = Path("~/.cache/headrace/SmolLM2-135M-Instruct").expanduser()


def hidden(model, tokenizer, conversations):
    texts = [tokenizer.apply_chat_template(each, tokenize=False) for each in conversations]
    batches = [
        tokenizer(texts[start : start + 16], return_tensors="pt", padding=True) for start in range(0, len(texts), 16)
    ]
    with torch.inference_mode():
        return torch.cat(
            [last(model.model(**batch).last_hidden_state, batch.attention_mask) for batch in batches]
        ).clone()


def last(states, mask):
    """The state of each row's last token; padding is on the right."""
    return states[torch.arange(len(states)), mask.sum(1) - 1]


def main(pairs=Path("pairs.jsonl"), folder=Path("reward-model")):
    torch.manual_seed(1)
    tokenizer = AutoTokenizer.from_pretrained(MODEL, padding_side="right")
    tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForSequenceClassification.from_pretrained(MODEL, num_labels=1, dtype=torch.float32).eval()
    rows = [json.loads(line) for line in pairs.read_text().splitlines()]
    chosen, rejected = (hidden(model, tokenizer, [row[name] for row in rows]) for name in ("chosen", "rejected"))
    differences, held_out = (chosen - rejected)[16:], (chosen - rejected)[:16]
    head = torch.zeros(differences.shape[1], requires_grad=True)
    optimizer = torch.optim.AdamW([head], lr=1e-3, weight_decay=0.1)
    for _ in range(200):
        loss = -torch.nn.functional.logsigmoid(differences @ head).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    right = (held_out @ head > 0).float().mean().item()
    print(f"{len(differences)} pairs: loss {loss.item():.3f}; of {len(held_out)} others {right:.0%} in the right order")
    model.score.weight.data[0] = head.detach()
    model.config.pad_token_id = tokenizer.pad_token_id
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
