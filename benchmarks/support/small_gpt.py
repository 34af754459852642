"""A small GPT in plain torch, trained within a minute on documents of sentences about a few people and things each."""

from __future__ import annotations

import math
import random

import torch
from torch import Tensor, nn
from torch.nn import functional

LAYERS = 3
HEADS = 2
HEAD_SIZE = 32
WIDTH = HEADS * HEAD_SIZE
MOST_TOKENS = 128
BATCH = 8
LEARNING_RATE = 4e-3
THREADS = 2

WORDS = {
    "names": "anna boris clara dmitri elena frank greta hugo irene jonas karla louis maria nils olga pedro",
    "verbs": "asks breaks carries draws eats finds gives hides keeps likes makes needs opens paints reads sells",
    "things": "apples boats candles doors engines flowers guitars hammers jackets kettles lamps maps nets onions",
}
CHOSEN = 6
"""People, verbs and things of a document, of each kind."""
VOCABULARY = [*" ".join(WORDS.values()).split(), "."]
Kv = Tensor
"""Keys and values: `[layer, head, K or V, token, element]`."""


def documents(count: int, token_count: int, seed: int) -> Tensor:
    """Token ids of documents, one for each word: who does what is drawn for each document, and repeats in it."""
    choose = random.Random(seed)
    return torch.tensor([_document(choose, token_count) for _ in range(count)])


def _document(choose: random.Random, token_count: int) -> list[int]:
    names, verbs, things = (choose.sample(words.split(), CHOSEN) for words in WORDS.values())
    does = {name: (choose.choice(verbs), choose.choice(things)) for name in names}
    text = list[str]()
    while len(text) < token_count:
        name = choose.choice(names)
        text += [name, *does[name], "."]
    return [VOCABULARY.index(word) for word in text[:token_count]]


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
        self.tokens, self.positions = nn.Embedding(len(VOCABULARY), WIDTH), nn.Embedding(MOST_TOKENS, WIDTH)
        self.befores = nn.Embedding(len(VOCABULARY), WIDTH)
        """Embeds the token before each one: so the model learns much sooner to look up what followed it last time."""
        self.layers = nn.ModuleList(_Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(VOCABULARY))
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02 if parameter.shape[0] != WIDTH else 0.02 / math.sqrt(LAYERS))

    def forward(self, ids: Tensor, past: Kv | None = None) -> tuple[Tensor, Kv]:
        """Logits of the next tokens, and the KV of these: of one document if there is a `past`.

        `ids` then begin with the last token of that, whose KV is in it.
        """
        start = 0 if past is None else past.shape[3]
        before = functional.pad(ids[:, :-1], (1, 0)) if past is None else ids[:, :-1]
        ids = ids if past is None else ids[:, 1:]
        positions = self.positions(torch.arange(start, start + ids.shape[1]))
        hidden = self.tokens(ids) + self.befores(before) + positions
        found = []
        for number, layer in enumerate(self.layers):
            hidden, kv = layer(hidden, None if past is None else past[number][None])
            found.append(kv)
        return self.head(self.norm(hidden)), torch.stack(found, dim=1)

    @torch.no_grad()
    def kv_of(self, ids: Tensor) -> Kv:
        """The KV of a document."""
        found: Kv = self(ids[None])[1][0]
        return found

    @torch.no_grad()
    def loss_behind(self, kv: Kv, ids: Tensor) -> float:
        """The mean loss of the tokens behind the first two of `ids`, of which the first is the last one of this KV."""
        logits, _ = self(ids[None, :-1], kv.float())
        return float(functional.cross_entropy(logits[0], ids[2:]))

    @torch.no_grad()
    def answer_behind(self, kv: Kv, ids: Tensor, count: int) -> tuple[int, ...]:
        """The most likely tokens behind two: the last one of this KV, and one more."""
        past, answer = kv.float(), ids.tolist()
        for _ in range(count):
            logits, new = self(torch.tensor([answer[-2:]]), past)
            past = torch.cat((past, new[0]), dim=3)
            answer.append(int(logits[0, -1].argmax()))
        return tuple(answer[2:])


def trained(steps: int) -> tuple[SmallGpt, float]:
    """The model after a number of training steps, and its loss in the last of them."""
    torch.set_num_threads(THREADS)
    torch.manual_seed(1)
    model, losses = SmallGpt(), list[float]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (1 + step) / 30, 2 * (1 - step / steps))
        ids = documents(BATCH, MOST_TOKENS, seed=1000 + step)
        logits, _ = model(ids[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(float(loss.detach()))
    return model.eval(), sum(losses[-20:]) / len(losses[-20:])
