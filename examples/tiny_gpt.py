"""A small GPT, the model of train_tiny_gpt.py.

In: token ids with their documents and positions.  Out: logits of the next token.
Promise: a token sees its own document only, so a row gives each of its documents what the document
alone would give.
Not here: data, training.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, gelu, linear, scaled_dot_product_attention

from shardmill.trainers.torch import document_mask


class Block(nn.Module):
    """Attention, then a feed-forward net, each added to what came in."""

    def __init__(self, width: int, heads: int, drop: float) -> None:
        super().__init__()
        self.heads, self.drop = heads, drop
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        n, seq_len, width = x.shape
        qkv = self.qkv(self.norm_1(x)).view(n, seq_len, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (n, heads, seq_len, width / heads)
        seen = scaled_dot_product_attention(q, k, v, attn_mask=mask)
        seen = self.out(seen.transpose(1, 2).reshape(n, seq_len, width))
        x = x + dropout(seen, self.drop, self.training)
        return x + dropout(self.down(gelu(self.up(self.norm_2(x)))), self.drop, self.training)


class TinyGPT(nn.Module):
    """Learned positions, pre-norm blocks, and one matrix for tokens going in and coming out."""

    def __init__(
        self, vocab_size: int, seq_len: int, *, width: int, layers: int, heads: int, drop: float
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(seq_len, width)
        self.blocks = nn.ModuleList(Block(width, heads, drop) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for matrix in (p for p in self.parameters() if p.ndim == 2):
            nn.init.normal_(matrix, std=0.02)

    def forward(self, input_ids: Tensor, doc_ids: Tensor, position_ids: Tensor) -> Tensor:
        """(n, seq_len) int64 each; gives (n, seq_len, vocab_size)."""
        mask = document_mask(doc_ids)
        x: Tensor = self.tokens(input_ids) + self.positions(position_ids)
        for block in self.blocks:
            x = block(x, mask)
        return linear(self.norm(x), self.tokens.weight)

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())


def next_token_loss(model: TinyGPT, batch: dict[str, Tensor]) -> Tensor:
    """The mean over all labels that count: those across a document's border are -100. A batch
    without `doc_ids` is one document a row."""
    ids = batch["input_ids"]
    documents = batch.get("doc_ids", torch.zeros_like(ids))
    positions = batch.get("position_ids", torch.arange(ids.shape[1]).expand_as(ids))
    logits = model(ids, documents, positions)
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


@torch.no_grad()
def mean_loss(model: TinyGPT, batches: list[dict[str, Tensor]]) -> float:
    """The loss over batches without dropout; the model is left in training mode."""
    model.eval()
    losses = [next_token_loss(model, batch).item() for batch in batches]
    model.train()
    return sum(losses) / len(losses)
