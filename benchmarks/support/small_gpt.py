"""A small GPT in plain torch, trained within a minute on documents of sentences about a few people and things each."""

from __future__ import annotations

import math
import random
import string
import time

import torch
from torch import Tensor, nn
from torch.nn import functional

LAYERS = 4
HEADS = 4
HEAD_SIZE = 32
WIDTH = HEADS * HEAD_SIZE
MOST_TOKENS = 512
BATCH = 4
LEARNING_RATE = 1e-3
THREADS = 2

WORDS = {
    "names": "anna boris clara dmitri elena frank greta hugo irene jonas karla louis maria nils olga pedro",
    "verbs": "asks breaks carries draws eats finds gives hides keeps likes makes needs opens paints reads sells",
    "things": "apples boats candles doors engines flowers guitars hammers jackets kettles lamps maps nets onions",
}
CHOSEN = 3
"""People, verbs and things of a document, of each kind."""
ALPHABET = string.ascii_lowercase + " ."
Kv = Tensor
"""Keys and values: `[layer, head, K or V, token, element]`."""


def documents(count: int, token_count: int, seed: int) -> Tensor:
    """Token ids of documents, one for each letter: who does what is drawn for each document, and repeats in it."""
    choose = random.Random(seed)
    return torch.tensor([_document(choose, token_count) for _ in range(count)])


def _document(choose: random.Random, token_count: int) -> list[int]:
    names, verbs, things = (choose.sample(words.split(), CHOSEN) for words in WORDS.values())
    does = {name: (choose.choice(verbs), choose.choice(things)) for name in names}
    text = ""
    while len(text) < token_count:
        name = choose.choice(names)
        text += " ".join((name, *does[name])) + ". "
    return [ALPHABET.index(character) for character in text[:token_count]]


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.projections, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor, past: Tensor | None) -> tuple[Tensor, Tensor]:
        """The hidden states, and keys and values `[batch, head, K or V, token, element]` of these tokens."""
        batch, count, _ = hidden.shape
        projected = self.projections(self.before(hidden)).view(batch, count, 3, HEADS, HEAD_SIZE)
        queries, kv = projected[:, :, 0].transpose(1, 2), projected[:, :, 1:].permute(0, 3, 2, 1, 4)
        keys, values = kv.unbind(2)
        if past is not None:
            keys, values = (torch.cat(pair, dim=2) for pair in zip(past.unbind(2), (keys, values), strict=True))
        mask = torch.ones(count, keys.shape[2], dtype=torch.bool).tril(keys.shape[2] - count)
        found = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        hidden = hidden + self.out(found.transpose(1, 2).reshape(batch, count, WIDTH))
        return hidden + self.narrow(functional.gelu(self.wide(self.after(hidden)))), kv


class SmallGpt(nn.Module):
    """The model; its KV can be taken out, changed, and continued with."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(len(ALPHABET), WIDTH), nn.Embedding(MOST_TOKENS, WIDTH)
        self.layers = nn.ModuleList(_Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(ALPHABET))
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02 if parameter.shape[0] != WIDTH else 0.02 / math.sqrt(LAYERS))

    def forward(self, ids: Tensor, past: Kv | None = None) -> tuple[Tensor, Kv]:
        """Logits of the next tokens, and the KV of these: of one document if there is a `past`."""
        start = 0 if past is None else past.shape[3]
        hidden = self.tokens(ids) + self.positions(torch.arange(start, start + ids.shape[1]))
        found = []
        for number, layer in enumerate(self.layers):
            hidden, kv = layer(hidden, None if past is None else past[number][None])
            found.append(kv)
        return self.head(self.norm(hidden)), torch.stack(found, dim=1)

    @torch.no_grad()
    def kv_of(self, ids: Tensor) -> Kv:
        """The KV of a document."""
        return self(ids[None])[1][0]

    @torch.no_grad()
    def loss_behind(self, kv: Kv, ids: Tensor) -> float:
        """The mean loss of the tokens behind the first of `ids`, which follow a beginning of this KV."""
        logits, _ = self(ids[None, :-1], kv.float())
        return float(functional.cross_entropy(logits[0], ids[1:]))

    @torch.no_grad()
    def answer_behind(self, kv: Kv, token: int, count: int) -> tuple[int, ...]:
        """The most likely tokens behind a beginning of this KV and one more token."""
        past, answer = kv.float(), [token]
        for _ in range(count - 1):
            logits, new = self(torch.tensor([[answer[-1]]]), past)
            past = torch.cat((past, new[0]), dim=3)
            answer.append(int(logits[0, -1].argmax()))
        return tuple(answer)


def trained(seconds: float) -> tuple[SmallGpt, float]:
    """The model after so many seconds of training, and its loss in the last steps."""
    torch.set_num_threads(THREADS)
    model, seed, losses = SmallGpt(), 1000, list[float]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        seed += 1
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (1 + len(losses)) / 50)
        ids = documents(BATCH, MOST_TOKENS, seed)
        logits, _ = model(ids[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return model.eval(), sum(losses[-20:]) / len(losses[-20:])
